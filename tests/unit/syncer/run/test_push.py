"""A delta's way through the syncer: refused with a reason, or staged, acknowledged, and the same when repeated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from msgspec import structs

from skerry.wire.digests import delta_digest
from skerry.wire.frames import encode_frames
from skerry.wire.layout import BadNameError
from skerry.wire.policy import Policy
from skerry_syncer.errors import SyncerError
from skerry_syncer.run.parts import ByteBudget
from skerry_syncer.run.push import Push, begin_push
from skerry_syncer.run.replica import RunReplica
from skerry_syncer.settings import ReplicaSettings
from skerry_syncer.store.log import run_log
from skerry_syncer.store.log.entries import AcceptedItem, Fate, SessionItem
from tests.support.merge_driver import FLOAT32, FRAGMENT, Driver, layout_of

LAYOUT = layout_of((2, 2), (4,))
VALUES = np.array([1, 2, 2, 0, 3, 0, 0, 4], np.float32)
WHOLE, HALVES = ((0, 8),), ((0, 4), (4, 4))


class Bench:
    """A replica of an open run, and the header of a delta of its first version."""

    def __init__(self, driver: Driver) -> None:
        self.replica = RunReplica(
            driver.run,
            scratch=driver.scratch,
            settings=ReplicaSettings(),
        )
        self.budget = ByteBudget(1000)
        base = driver.log.state.fragments[FRAGMENT].newest.digest
        ids = ("d" * 32, FRAGMENT, "eu", "5" * 32)
        self.header = AcceptedItem(
            *ids, 0, base, "", (), step_count=24, token_count=100, last_step=24, squared_norms=()
        )

    async def begin(self, **changes: Any) -> Push:
        """Returns a push whose header has these changes."""
        header = structs.replace(self.header, **changes)
        return await begin_push(self.replica, header, self.budget, "client")

    async def push(self, *parts: tuple[int, int], values: Any = VALUES, **changes: Any) -> Push:
        """Returns a push that has sent these parts."""
        push = await self.begin(**changes)
        for first, numel in parts:
            data = b"".join(encode_frames(values[first : first + numel], LAYOUT, FLOAT32, first=first))
            await push.begin_part(first, numel, len(data))
            await push.feed(data[:50])
            await push.feed(data[50:])
            await push.end_part(part_digest(values, first, numel))
        await push.all_stored()
        return push


def part_digest(values: Any, first: int, numel: int) -> bytes:
    return blake3(values[first : first + numel].tobytes()).digest()


def digest_of(parts: Iterable[tuple[int, int]], values: Any = VALUES) -> bytes:
    return delta_digest([(first, numel, part_digest(values, first, numel)) for first, numel in parts])


@pytest.fixture
async def bench() -> Bench:
    driver = await Driver.start(LAYOUT, Policy())
    await driver.append(SessionItem("eu", "5" * 32, "here"))
    return Bench(driver)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fragment": "unknown"}, "FRAGMENT_NOT_FOUND"),
        ({"base_version": -2}, "BAD_REQUEST"),
        ({"base_version": -1}, "SESSION_UNKNOWN"),
        ({"base_digest": "00"}, "BAD_REQUEST"),
        ({"step_count": 0}, "BAD_REQUEST"),
        ({"token_count": 2**53 + 1}, "BAD_REQUEST"),
        ({"last_step": 23}, "BAD_REQUEST"),
        ({"session": "6" * 32}, "SESSION_UNKNOWN"),
        ({"base_version": 1}, "BASE_FUTURE"),
        ({"base_digest": "0" * 64}, "BASE_FOREIGN"),
    ],
)
async def test_a_header_is_refused_before_its_bytes_are_read(
    bench: Bench, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(SyncerError) as caught:
        await bench.begin(**changes)
    assert caught.value.reason == reason
    for field in ("learner", "session", "delta"):
        with pytest.raises(BadNameError):
            await bench.begin(**{field: "../eu"})


@pytest.mark.parametrize("parts", [WHOLE, HALVES])
async def test_a_delta_is_acknowledged_once_its_entry_is_in_the_log(
    bench: Bench, parts: tuple[tuple[int, int], ...]
) -> None:
    push = await bench.push(*parts)
    assert (push.known, bench.replica.state.deltas) == (None, {})
    delta = await push.complete(digest_of(parts))
    assert (delta.fate, delta.item.squared_norms) == (Fate.PENDING, (9.0, 25.0))
    assert [(ref.first, ref.numel) for ref in delta.item.parts] == list(parts)
    assert bench.replica.state.fragments[FRAGMENT].pending == {delta.item.delta: delta}


async def test_parts_that_an_earlier_call_made_durable_need_not_come_again(bench: Bench) -> None:
    await (await bench.push(HALVES[0])).abandon()
    early = await bench.push()
    with pytest.raises(SyncerError, match=r"parts are missing. .*stored=\['0\+4'\]") as caught:
        await early.complete(digest_of(HALVES))
    assert caught.value.reason == "INCOMPLETE"
    assert (await (await bench.push(HALVES[1])).complete(digest_of(HALVES))).fate is Fate.PENDING


async def test_the_same_push_again_returns_the_same_delta_and_another_of_its_base_is_refused(bench: Bench) -> None:
    first = await (await bench.push(*WHOLE)).complete(digest_of(WHOLE))
    position = bench.replica.state.position
    assert await (await bench.begin()).complete(digest_of(WHOLE)) is first
    with pytest.raises(SyncerError) as caught:
        await bench.begin(delta="e" * 32)
    assert (caught.value.reason, caught.value.metadata) == ("BASE_REPEATED", {"delta_id": "d" * 32})
    with pytest.raises(SyncerError) as caught:
        await (await bench.begin()).complete(digest_of(WHOLE, 2 * VALUES))
    assert caught.value.reason == "ID_REUSED"
    assert bench.replica.state.position == position


async def test_what_does_not_make_a_whole_delta_of_its_digest_is_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await (await bench.push((0, 5))).abandon()
    overlapping = await bench.push(HALVES[1])
    with pytest.raises(SyncerError, match="parts overlap") as caught:
        await overlapping.complete(digest_of(WHOLE))
    assert caught.value.reason == "OUT_OF_RANGE"
    with pytest.raises(SyncerError) as caught:
        await (await bench.push(*WHOLE, delta="e" * 32)).complete(digest_of(HALVES))
    assert caught.value.reason == "DIGEST_MISMATCH"
    whole = await bench.push(*HALVES)
    with monkeypatch.context() as patch:
        patch.setattr(run_log, "MAX_APPEND_BYTES", 100)
        with pytest.raises(SyncerError, match="too many parts") as caught:
            await whole.complete(digest_of(HALVES))
    assert caught.value.reason == "TOO_LARGE"
    assert (await whole.complete(digest_of(HALVES))).fate is Fate.PENDING


async def test_a_part_is_refused_by_its_place_its_size_and_its_bytes(bench: Bench) -> None:
    push = await bench.begin()
    for place, reason in (((4, 5, 0), "OUT_OF_RANGE"), ((0, 8, 2**30), "TOO_LARGE")):
        with pytest.raises(SyncerError) as caught:
            await push.begin_part(*place)
        assert caught.value.reason == reason
    await push.begin_part(0, 8, 200)
    assert bench.budget.used_bytes == 200
    await push.feed(b"".join(encode_frames(VALUES.copy(), LAYOUT, FLOAT32)))
    with pytest.raises(SyncerError) as caught:
        await push.end_part(bytes(32))
    assert caught.value.reason == "DIGEST_MISMATCH"
    await push.abandon()
    assert bench.budget.used_bytes == 0
