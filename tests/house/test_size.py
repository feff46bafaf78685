"""The product stays small: lines of code in all, lines of a file, lines of a function."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house import product
from tests.house.product import SourceFile
from tests.house.size import (
    FILE_LIMIT,
    FUNCTION_LIMIT,
    LINE_BUDGET,
    code_line_count,
    code_lines_by_package,
    long_files,
    long_functions,
)


def test_the_product_keeps_to_its_budget_of_lines() -> None:
    lines = code_lines_by_package()
    table = "\n".join(f"{package:20} {count:6}" for package, count in sorted(lines.items()))
    assert lines.total() <= LINE_BUDGET, f"{lines.total()} lines of code, the budget is {LINE_BUDGET}.\n{table}"


def test_no_file_is_too_long() -> None:
    found = long_files()
    assert not found, f"over {FILE_LIMIT} lines, part them by subject: {found}"


def test_no_function_is_too_long() -> None:
    found = long_functions()
    assert not found, f"over {FUNCTION_LIMIT} lines, part them or state the reason above in `# long: reason`: {found}"


def test_blanks_comments_and_docstrings_are_no_code() -> None:
    function = 'def f():\n    """Two\n    lines."""\n'
    text = f'"""Docstring."""\n\n# comment\nVALUE = (\n    1,  # one\n\n    2,\n)\n\n\n{function}'
    assert code_line_count(_source(text)) == 5


@pytest.mark.parametrize(("reason", "is_found"), [("", True), ("# long: a table", False)])
def test_a_long_function_may_state_its_reason(reason: str, is_found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "    x = 1\n" * (FUNCTION_LIMIT + 1)
    source = _source(f'VALUE = 1\n{reason}\n@decorator\ndef f():\n    """Docstring."""\n{body}')
    monkeypatch.setattr("tests.house.size.product_files", lambda: (source,))
    assert [one.line_count for one in long_functions()] == [FUNCTION_LIMIT + 1] * is_found


def _source(text: str) -> SourceFile:
    return product.parsed("core/skerry/made/up.py", text)


def test_the_product_is_found() -> None:
    assert {Path(source.path).parts[0] for source in product.product_files()} == set(product.SOURCE_ROOTS)
