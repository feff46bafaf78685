"""Which modules of the product import each other in a circle.

Every import counts, those for types alone and those inside functions too: a reader has to follow them all. A package
is a module of its own, its __init__; importing one of its modules does not count as importing the package.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from tests.house.product import SourceFile, product_files


def import_graph() -> dict[str, set[str]]:
    """Returns, for each module of the product, the modules of the product that it imports."""
    modules = {source.module for source in product_files()}
    return {source.module: set(_imported(source, modules)) - {source.module} for source in product_files()}


def import_cycles() -> list[tuple[str, ...]]:
    """Returns the sets of modules that import each other in a circle, each in alphabetical order."""
    return sorted(tuple(sorted(group)) for group in _circles(import_graph()))


def _imported(source: SourceFile, modules: set[str]) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"imports are absolute here. file={source.path}, line={node.lineno}"
            assert node.module is not None
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if name in modules:
                    yield name
                elif node.module in modules:
                    yield node.module


def _circles(graph: Mapping[str, set[str]]) -> Iterator[set[str]]:
    """Yields the strongly connected components of more than one module."""
    reached = {module: _reachable(graph, module) for module in graph}
    done: set[str] = set()
    for module in graph:
        if module not in done and module in reached[module]:
            circle = {other for other in reached[module] if module in reached[other]}
            done |= circle
            yield circle


def _reachable(graph: Mapping[str, set[str]], module: str) -> set[str]:
    found: set[str] = set()
    waiting = list(graph[module])
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += graph[name]
    return found
