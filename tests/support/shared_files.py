"""A plugin of pytest, for test files beside each other of which some share what they need: `--dist loadfile`."""

from __future__ import annotations

from pathlib import Path, PurePath

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

# Files whose tests need the same engine with its images, the same wheel, or Ceph's gateway, without which they are
# skipped. (`--dist loadgroup` forms no groups with pytest 9.2: pytest-xdist#1386.)
_SHARED = {
    "test_compose": "images", "test_helm_pods": "images", "test_images": "images", "test_monitoring": "images",
    "test_extras": "wheel", "test_install": "wheel",
    "test_ceph": "gateway", "test_interface": "gateway", "test_put_if_absent": "gateway",
}  # fmt: skip


class _SharedFiles(LoadFileScheduling):  # type: ignore[misc]  # untyped
    """`--dist loadfile`, which also runs in one process the files that share something."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return _SHARED.get(PurePath(file).stem, file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """Returns the scheduler of tests that run beside each other by file."""
    renamed = _SHARED.keys() - {file.stem for file in Path(__file__).parents[1].rglob("test_*.py")}
    assert not renamed, f"name these files anew in {__file__}: {sorted(renamed)}"
    return _SharedFiles(config, log) if config.getoption("dist") == "loadfile" else None
