"""Public classes, functions, methods and constants that no product code uses: dead, or there for tests alone.

A module's own names and its imports are told apart; attributes are compared by name alone, so an unused method is
missed where another of its name is used. What is called from outside the product counts as used: exports of
`skerry.client`, `skerry.wire` and the modules of `skerry.integrations`, the entry points of pyproject.toml, commands,
the methods of the contract's services, and what a library calls by name.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Final

from tests.house.product import ROOT, SourceFile, product_files

_EXPORTING: Final = ("skerry.client", "skerry.wire")
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
# Methods that a library calls by name: gRPC those of interceptors, torch those of modules, click those of groups.
_CALLED_BY_NAME: Final = frozenset({"intercept_service", "forward", "get_command", "list_commands", "resolve_command"})


def unused_definitions() -> list[str]:
    """Returns `file:name` of each public class or function of a module that no other product code uses."""
    kept = exported_names() | _entry_points()
    return [
        f"{source.path}:{definition.name}"
        for source in product_files()
        for definition in source.tree.body
        if isinstance(definition, Definition)
        and not definition.name.startswith("_")
        and definition.name not in kept
        and not _is_command(definition)
        and not _is_named(source, definition.name, definition)
    ]


def unused_constants() -> list[str]:
    """Returns `file:name` of each public constant of a module that no other product code uses."""
    found = []
    for source in product_files():
        for statement in source.tree.body:
            targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            public = [name for name in names if not name.startswith("_") and name not in exported_names()]
            found += [f"{source.path}:{name}" for name in public if not _is_named(source, name, statement)]
    return found


def unused_methods() -> list[str]:
    """Returns `file:class.name` of each public method that no other product code uses.

    Methods of exported classes are for users to call.
    """
    exported = exported_names() | _contract_names() | _CALLED_BY_NAME
    return [
        f"{source.path}:{owner.name}.{method.name}"
        for source in product_files()
        for owner in source.tree.body
        if isinstance(owner, ast.ClassDef) and owner.name not in exported
        for method in owner.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
        and not method.name.startswith("_")
        and method.name not in exported
        and not _is_called(method.name, method)
    ]


@cache
def exported_names() -> frozenset[str]:
    """Returns the names in `__all__` of the packages that others program against."""
    names: set[str] = set()
    for source in product_files():
        is_exporting = source.is_package and source.module in _EXPORTING
        if is_exporting or source.package == "skerry.integrations":
            names |= set(_strings_of_all(source))
    return frozenset(names)


def _strings_of_all(source: SourceFile) -> Iterator[str]:
    for statement in source.tree.body:
        if isinstance(statement, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "__all__" for target in statement.targets
        ):
            yield from ast.literal_eval(statement.value)


@cache
def _entry_points() -> frozenset[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["scripts"], *project["entry-points"].values()]
    return frozenset(target.partition(":")[2] for group in groups for target in group.values())


def _is_command(definition: Definition) -> bool:
    """Whether click calls it: it is decorated with `command` or `group` of something."""
    called = [node.func if isinstance(node, ast.Call) else node for node in definition.decorator_list]
    return any(isinstance(node, ast.Attribute) and node.attr in {"command", "group"} for node in called)


@cache
def _contract_names() -> frozenset[str]:
    """Returns the names of the contract's methods, which servicers implement and gRPC calls."""
    contract = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "protos/skerry/v1").glob("*.proto"))
    return frozenset(re.findall(r"^\s*rpc (\w+)", contract, re.MULTILINE)) | {"Check", "Watch"}  # of grpc.health.v1


@cache
def _imports() -> frozenset[tuple[str, str]]:
    """Returns each (module, name) that product code imports by `from module import name`."""
    return frozenset(
        (node.module or "", alias.name)
        for source in product_files()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    )


@cache
def _attributes() -> Counter[str]:
    """Returns how often product code reads or calls something's attribute of each name."""
    return Counter(_attribute_names(source.tree for source in product_files()))


def _is_named(source: SourceFile, name: str, definition: ast.AST) -> bool:
    """Whether a module's own code, another module's import or an attribute names it, outside the definition itself."""
    is_read_here = Counter(_plain_names(source.tree))[name] > Counter(_plain_names(definition))[name]
    return is_read_here or (source.module, name) in _imports() or _is_called(name, definition)


def _is_called(name: str, definition: ast.AST) -> bool:
    """Whether code outside the definition, which may be recursive, has an attribute of its name."""
    return _attributes()[name] > Counter(_attribute_names([definition]))[name]


def _plain_names(tree: ast.AST) -> Iterator[str]:
    yield from (node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))


def _attribute_names(trees: Iterable[ast.AST]) -> Iterator[str]:
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    yield from (node.attr for node in nodes if isinstance(node.ctx, ast.Load))
