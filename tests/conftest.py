"""What holds for every test."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.support.no_cloud import stay_here

stay_here()

# Hypothesis fails an example that takes over 200 ms, which says more about the machine's load than about the code.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


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
