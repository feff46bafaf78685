"""docs/performance.md shows the committed rows of the speed benchmark as they were measured."""

from __future__ import annotations

from benchmarks.speed import scale
from benchmarks.speed.table import COMMITTED, PAGE, SCALE, TABLES, fill, read


def test_every_table_was_measured_and_is_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert set(read(COMMITTED)) == set(TABLES)
    assert [table for table in (*TABLES, SCALE) if f"<!-- table {table} -->" not in page] == []


def test_the_page_shows_every_row_as_it_was_measured() -> None:
    tables = read(COMMITTED)
    page = PAGE.read_text(encoding="utf-8")
    assert fill(page, {**tables, SCALE: list(scale.rows(tables))}) == page
