"""The product's source files, parsed once: everything below core, client and services."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
SOURCE_ROOTS: Final = ("core", "client", "services")


@dataclass(frozen=True)
class SourceFile:
    """One file of the product."""

    path: str  # from the root of the tree, with slashes
    module: str  # dotted; a package's own name for its __init__
    text: str
    tree: ast.Module

    @property
    def package(self) -> str:
        """The import package that the file belongs to, such as skerry.wire."""
        return ".".join(self.module.split(".")[:2])

    @property
    def is_package(self) -> bool:
        """Whether the file is an __init__."""
        return self.path.endswith("/__init__.py")


@cache
def product_files() -> tuple[SourceFile, ...]:
    """Returns every Python file of the product, in the order of its path."""
    paths = [path for root in SOURCE_ROOTS for path in sorted((ROOT / root / "skerry").rglob("*.py"))]
    return tuple(parsed(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in paths)


def parsed(path: str, text: str) -> SourceFile:
    """Returns a source file of this path, from the root of the tree, and this text."""
    module = path.partition("/")[2].removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return SourceFile(path, module, text, ast.parse(text, path))
