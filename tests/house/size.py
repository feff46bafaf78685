"""How large the product is: lines of code, the longest files and the longest functions.

A line of code is a line of a .py file that holds more than blanks, a comment or a docstring. Generated stubs, which lie
in protos, are not counted. The budget holds for lines of at most 120 columns, which the linter checks.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from typing import Final, NamedTuple

from tests.house.product import SourceFile, product_files, walk_functions

# Lines of product code in all. What is added is paid for by what it does; everything else only makes it smaller.
LINE_BUDGET: Final = 23_420
FILE_LIMIT: Final = 400
FUNCTION_LIMIT: Final = 50
# A function over the limit states its reason in a comment of this form, on the line above it.
REASON: Final = "# long: "

_LAYOUT: Final = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
    }
)

_DOCUMENTED: Final = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class TooLong(NamedTuple):
    """A file or function over its limit."""

    name: str  # a path, or path:function
    line_count: int


def code_line_count(source: SourceFile) -> int:
    """Returns the file's lines of code."""
    lines = source.text.splitlines()
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type not in _LAYOUT:
            code.update(number for number in range(token.start[0], token.end[0] + 1) if lines[number - 1].strip())
    return len(code - _docstring_lines(source.tree))


def code_lines_by_package() -> Counter[str]:
    """Returns the lines of code of each package of the product."""
    count: Counter[str] = Counter()
    for source in product_files():
        count[source.package] += code_line_count(source)
    return count


def long_files() -> list[TooLong]:
    """Returns the files of more than `FILE_LIMIT` lines, blank ones and comments included."""
    lengths = [TooLong(source.path, len(source.text.splitlines())) for source in product_files()]
    return [one for one in lengths if one.line_count > FILE_LIMIT]


def long_functions() -> list[TooLong]:
    """Returns the functions whose body has more than `FUNCTION_LIMIT` lines and that give no reason for it.

    The body is counted from its first statement after the docstring to its end, blank lines and comments included.
    """
    found = []
    for source in product_files():
        lines = source.text.splitlines()
        for name, function in walk_functions(source.tree):
            count = _body_line_count(function)
            first = min(node.lineno for node in (function, *function.decorator_list))
            if count > FUNCTION_LIMIT and not lines[max(0, first - 2)].strip().startswith(REASON):
                found.append(TooLong(f"{source.path}:{name}", count))
    return found


def _body_line_count(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = function.body[1:] if _is_docstring(function.body[0]) else function.body
    return 0 if not body else (body[-1].end_lineno or 0) - body[0].lineno + 1


def _docstring_lines(tree: ast.Module) -> set[int]:
    """Returns the lines of the docstrings of modules, classes and functions."""
    documented = [node for node in ast.walk(tree) if isinstance(node, _DOCUMENTED) and node.body]
    return {
        number
        for node in documented
        if _is_docstring(first := node.body[0])
        for number in range(first.lineno, (first.end_lineno or 0) + 1)
    }


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
