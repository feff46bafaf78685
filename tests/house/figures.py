"""Prints the figures that the tests of this folder hold to their bounds: `python -m tests.house.figures`."""

from __future__ import annotations

from collections.abc import Iterable

from tests.house.imports import import_cycles
from tests.house.policy_fields import FILE_LIMIT as FILES_A_FIELD
from tests.house.policy_fields import files_by_field
from tests.house.product import product_files
from tests.house.size import FILE_LIMIT, FUNCTION_LIMIT, LINE_BUDGET, code_lines_by_package, long_files, long_functions
from tests.house.unused import unused_constants, unused_definitions, unused_methods
from tests.house.walk import FILE_BOUND, walk


def main() -> None:
    """Prints every figure, and what exceeds its bound."""
    lines = code_lines_by_package()
    print(f"code lines: {lines.total()} of {LINE_BUDGET}, in {len(product_files())} files")
    for package, count in sorted(lines.items()):
        print(f"  {package:20} {count:6}")
    journey = walk()
    print(f"files that one delta runs through: {len(journey)} of {FILE_BOUND}")
    for number, (name, first) in enumerate(journey.items(), 1):
        print(f"  {number:3} {name:55} {first}")
    _print_all("import cycles", (", ".join(cycle) for cycle in import_cycles()))
    _print_all(f"files over {FILE_LIMIT} lines", (f"{name} {count}" for name, count in long_files()))
    _print_all(
        f"functions over {FUNCTION_LIMIT} lines without a reason",
        (f"{name} {count}" for name, count in long_functions()),
    )
    _print_all("classes and functions used by tests only, or not at all", unused_definitions())
    _print_all("methods used by tests only, or not at all", unused_methods())
    _print_all("constants used by tests only, or not at all", unused_constants())
    print(f"files that mention a field of the policy, of {FILES_A_FIELD}:")
    for field, files in files_by_field().items():
        print(f"  {field:20} {len(files):3}")


def _print_all(what: str, found: Iterable[str]) -> None:
    names = list(found)
    print(f"{what}: {len(names)}")
    for name in names:
        print(f"  {name}")


if __name__ == "__main__":
    main()
