"""Which files docs/architecture.md names."""

from __future__ import annotations

import re

from tests.house.product import ROOT


def named_files() -> list[str]:
    """Returns whole paths in code type, and names in bold type below the folder that their section's heading names."""
    names: set[str] = set()
    folder = ""
    for line in (ROOT / "docs/architecture.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            given = re.search(r"\(`([^`]+)`", line)
            folder = folder if given is None else given[1]
        names.update(f"{folder}/{name}" for name in re.findall(r"\*\*([\w/]+\.py)\*\*", line))
        names.update(re.findall(r"`((?:core|client|services|tests|docs|protos)/[\w/.]+)`", line))
    return sorted(names)
