"""A real syncer on a real socket for the client's tests, on a thread of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.syncer_thread import syncer


@pytest.fixture
def target() -> Iterator[str]:
    """Where a fresh syncer with an empty store listens."""
    with syncer() as address:
        yield address
