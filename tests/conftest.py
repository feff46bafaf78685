"""What holds for every test."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path, PurePath

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from tests.support.no_cloud import stay_here

stay_here()

# Hypothesis fails an example that takes over 200 ms, which says more about the machine's load than about the code.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


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
    renamed = _SHARED.keys() - {file.stem for file in Path(__file__).parent.rglob("test_*.py")}
    assert not renamed, f"name these files anew in {__file__}: {sorted(renamed)}"
    return _SharedFiles(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(autouse=True)
def own_log_settings() -> Iterator[None]:
    """Gives each test the log settings of a new process: commands and fixtures set the process's."""
    yield
    logger = logging.getLogger("skerry")
    logger.handlers = []
    logger.setLevel(logging.NOTSET)


@pytest.fixture
def target() -> Iterator[str]:
    """Where a fresh syncer with an empty store listens, on a real socket."""
    from tests.support.syncer_thread import syncer

    with syncer() as address:
        yield address
