"""docs/performance.md shows the committed rows of the speed benchmark as they were measured."""

from __future__ import annotations

from benchmarks.speed.table import COMMITTED, COMPUTED, PAGE, TABLES, computed, fill, read


def test_every_table_was_measured_and_is_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert set(read(COMMITTED)) == set(TABLES)
    assert [table for table in (*TABLES, *COMPUTED) if f"<!-- table {table} -->" not in page] == []


def test_the_page_shows_every_row_as_it_was_measured() -> None:
    tables = read(COMMITTED)
    page = PAGE.read_text(encoding="utf-8")
    assert fill(page, {**tables, **computed(tables)}) == page
