"""What the syncer's image is installed from is locked, to the version and the byte, and lacks nothing."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
_LINE = re.compile(
    r"(?P<name>[\w.-]+)==(?P<version>[\w.+!]+)[^\n]*\\\n(?P<hashes>(?:    --hash=sha256:[0-9a-f]{64}[ \\]*\n)+)"
)


def _pins(text: str) -> dict[str, str]:
    lines = [line.partition("==") for line in text.splitlines() if not line.startswith("#")]
    return {canonicalize_name(name): version for name, _, version in lines}


def _lock(name: str) -> dict[str, str]:
    text = (ROOT / "docker" / f"requirements-{name}.txt").read_text()
    found = list(_LINE.finditer(text))
    assert "".join(match[0] for match in found) == text, "a line without a version or without a hash"
    return {canonicalize_name(match["name"]): match["version"] for match in found}


def _closure(requirements: Iterable[str]) -> set[str]:
    """Returns what these packages need here, themselves included."""
    found: set[str] = set()
    left = list(requirements)
    while left:
        one = Requirement(left.pop())
        name = canonicalize_name(one.name)
        if name in found or not (one.marker is None or one.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        left += distribution(name).requires or []
    return found


def test_the_wheel_asks_for_a_grpc_and_a_protobuf_that_take_its_stubs() -> None:
    stub = (ROOT / "client/skerry/v1/runs_pb2_grpc.py").read_text()
    (grpc,) = re.findall(r"^GRPC_GENERATED_VERSION = '([\d.]+)'", stub, re.MULTILINE)
    (protobuf,) = re.findall(
        r"^# Protobuf Python Version: ([\d.]+)", (ROOT / "client/skerry/v1/runs_pb2.py").read_text(), re.MULTILINE
    )
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = {one.name: one.specifier for one in map(Requirement, project["project"]["dependencies"])}
    assert f">={grpc}" in str(wanted["grpcio"]), "the stubs refuse an older one"
    assert f">={protobuf}" in str(wanted["protobuf"]), "the stubs refuse an older one"


@pytest.mark.parametrize("name", ["syncer", "build"])
def test_everything_that_is_needed_is_locked_to_the_version_that_is_tested(name: str) -> None:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = project["project"]["dependencies"] if name == "syncer" else project["build-system"]["requires"]
    lock = _lock(name)
    assert _closure(needed) <= lock.keys()
    tested = _pins((ROOT / "constraints.txt").read_text())
    assert {package: version for package, version in lock.items() if tested.get(package) != version} == {}
