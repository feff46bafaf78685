"""Objects of a bucket are read in bounded ranges, one request each."""

from __future__ import annotations

import random
from typing import Any

import obstore
import pytest
from obstore.store import MemoryStore

from skerry_syncer.store.objects.buckets import ObstoreObjects

RANGE = 1000
DATA = random.Random(0).randbytes(2 * RANGE + 17)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The range of every request, as it is made."""
    asked: list[tuple[int, int]] = []
    get = obstore.get_async

    async def noted(*arguments: Any, options: Any) -> obstore.GetResult:
        asked.append(options["range"])
        return await get(*arguments, options=options)

    monkeypatch.setattr(obstore, "get_async", noted)
    return asked


@pytest.mark.parametrize(
    ("size", "ranges"),
    [
        (RANGE, [(0, RANGE)]),
        (RANGE + 1, [(0, RANGE), (RANGE, 2 * RANGE)]),
        (len(DATA), [(0, RANGE), (RANGE, 2 * RANGE), (2 * RANGE, 3 * RANGE)]),
    ],
)
async def test_an_object_is_read_in_as_few_ranges_as_it_takes(
    size: int, ranges: list[tuple[int, int]], asked: list[tuple[int, int]]
) -> None:
    objects = ObstoreObjects(MemoryStore(), range_bytes=RANGE)
    await objects.write("a", DATA[:size])
    assert b"".join([piece async for piece in objects.stream("a")]) == DATA[:size]
    assert asked == ranges
