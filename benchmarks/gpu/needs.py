"""What the benchmark needs, so that a machine without it hears so at once. Imports nothing that may be missing."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Final

_PROJECT: Final = Path(__file__).parents[2] / "pyproject.toml"
# Of the development group, what the benchmarks and the tests that need CUDA import.
_DEVELOPMENT: Final = frozenset({"hypothesis", "psutil", "pytest"})


def unmet() -> tuple[list[str], list[str]]:
    """Returns the requirements that are not installed, and those that are there in another version."""
    project = tomllib.loads(_PROJECT.read_text(encoding="utf-8"))
    wanted = [*project["project"]["dependencies"], *project["project"]["optional-dependencies"]["torch"]]
    wanted += [item for item in project["dependency-groups"]["dev"] if _name(item) in _DEVELOPMENT]
    missing, others = [], []
    for requirement in ("skerry", *wanted):  # whose commands are found by its metadata
        try:
            version = metadata.version(_name(requirement))
        except metadata.PackageNotFoundError:
            missing.append(_name(requirement))
            continue
        if not _is_met(requirement, version):
            others.append(f"{requirement} (here {version})")
    return missing, others


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def _is_met(requirement: str, version: str) -> bool:
    """Whether a version will do, as far as this can be told."""
    if find_spec("packaging") is None:
        return True
    from packaging.requirements import Requirement

    return Requirement(requirement).specifier.contains(version, prereleases=True)
