"""Which files mention each field of the policy: what a new field would have to touch.

Tests are left out, and so are generated stubs, which nobody edits.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

from skerry.wire.policy import Policy
from tests.house.product import ROOT

# A new field of the policy should need a change in no more files than this, those that act on it included.
FILE_LIMIT: Final = 8
_FOLDERS: Final = ("protos", "core", "client", "services", "docs")
_SUFFIXES: Final = frozenset({".py", ".proto", ".md"})


def files_by_field() -> dict[str, list[str]]:
    """Returns, for each field of the policy, the files outside tests that mention it."""
    return {field.name: list(_files_that_mention(field.name)) for field in dataclasses.fields(Policy)}


def _files_that_mention(field: str) -> Iterator[str]:
    # A duration has its unit in its name in Python, and in its type in the contract.
    pattern = re.compile(rf"\b{field}\b|\b{field.removesuffix('_s')}\b")
    yield from (name for name, text in _texts() if pattern.search(text))


@cache
def _texts() -> tuple[tuple[str, str], ...]:
    paths = [path for folder in _FOLDERS for path in sorted((ROOT / folder).rglob("*")) if _is_written(path)]
    return tuple((path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in paths)


def _is_written(path: Path) -> bool:
    return path.suffix in _SUFFIXES and "_pb2" not in path.name
