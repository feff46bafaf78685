"""The byte budget admits in order, and a part is kept, counted and refused by its bytes."""

from __future__ import annotations

import asyncio
import math
import struct
import zlib

import numpy as np
import pytest

from skerry.wire.codecs import HEADER_SIZE, Codec, Compressor, Encoding
from skerry.wire.errors import FrameError
from skerry.wire.frames import encode_frames
from skerry.wire.layout import FragmentLayout, TensorSpec
from skerry_syncer.errors import SyncerError
from skerry_syncer.rpc.status import as_syncer_error
from skerry_syncer.run.parts import ArrivingPart, ByteBudget

LAYOUT = FragmentLayout("body", (TensorSpec("a", (32, 32)), TensorSpec("b", (32, 32))))
PLAIN = b"".join(
    encode_frames(np.ones(LAYOUT.numel, np.float32), LAYOUT, Encoding(Codec.FLOAT32, compressor=Compressor.NONE))
)


async def test_a_part_that_does_not_fit_waits_until_it_does() -> None:
    budget = ByteBudget(100)
    await budget.reserve("a", 80)
    waiting = asyncio.create_task(budget.reserve("b", 40))
    await asyncio.sleep(0)
    assert not waiting.done()
    budget.release("a", 80)
    await waiting
    assert budget.used_bytes == 40


async def test_a_part_that_is_larger_than_the_budget_is_let_in_alone_and_is_not_overtaken() -> None:
    budget = ByteBudget(100)
    await budget.reserve("a", 10)
    waiting, behind = asyncio.create_task(budget.reserve("b", 300)), asyncio.create_task(budget.reserve("c", 10))
    await asyncio.sleep(0)
    assert (waiting.done(), behind.done()) == (False, False)
    budget.release("a", 10)
    await waiting
    assert not behind.done()
    budget.release("b", 300)
    await behind


async def test_who_gives_up_waiting_holds_nothing_and_holds_up_nobody() -> None:
    budget = ByteBudget(100)
    await budget.reserve("a", 50)
    hasty, patient = asyncio.create_task(budget.reserve("b", 60)), asyncio.create_task(budget.reserve("c", 50))
    await asyncio.sleep(0)
    hasty.cancel()
    await patient
    assert budget.used_bytes == 100
    granted = asyncio.create_task(budget.reserve("d", 50))
    await asyncio.sleep(0)
    budget.release("a", 50)  # grants it, in the moment in which it is cancelled
    granted.cancel()
    await asyncio.wait([granted])
    assert budget.used_bytes == 50


async def test_a_client_that_stops_in_its_transfers_keeps_an_eighth_of_the_budget_from_the_others() -> None:
    budget = ByteBudget(800)
    stopped = [asyncio.create_task(budget.reserve("stopped", 50)) for _ in range(100)]
    await asyncio.sleep(0)
    for number in range(7):
        await budget.reserve(f"other {number}", 100)
    assert budget.used_bytes == 800
    assert sum(task.done() for task in stopped) == 2
    budget.release("stopped", 50)
    await asyncio.sleep(0)
    assert sum(task.done() for task in stopped) == 3
    for task in stopped:
        task.cancel()
    await asyncio.wait(stopped)


def _encoded(encoding: Encoding) -> bytes:
    return b"".join(encode_frames(np.ones(LAYOUT.numel, np.float32), LAYOUT, encoding))


def _arrived(data: bytes, limit_bytes: int = 2**20) -> ArrivingPart:
    part = ArrivingPart(LAYOUT, 0, LAYOUT.numel, codecs=frozenset(Codec), limit_bytes=limit_bytes)
    for start in range(0, len(data), 100):
        part.feed(data[start : start + 100])
    return part


def test_a_part_has_the_squared_norm_of_each_of_its_tensors() -> None:
    values = np.repeat(np.array([1, 2], np.float32), 1024)
    part = _arrived(b"".join(encode_frames(values, LAYOUT, Encoding(Codec.FLOAT32))))
    part.finish()
    assert list(part.squared_norms) == [1024.0, 4096.0]


def test_a_part_that_decompresses_to_more_than_twice_its_size_is_not_kept() -> None:
    data, raw = _encoded(Encoding(Codec.INT4)), _encoded(Encoding(Codec.INT4, compressor=Compressor.NONE))
    assert len(data) < len(raw) // 4
    assert not _arrived(data, len(data)).kept
    assert _arrived(data, len(raw)).kept


def _not_finite() -> bytes:
    """Returns a frame with a right checksum and a NaN."""
    header, payload = PLAIN[: HEADER_SIZE - 4], struct.pack("<f", math.nan) + PLAIN[HEADER_SIZE + 4 :]
    return header + struct.pack("<I", zlib.crc32(header + payload)) + payload


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (_not_finite(), "NON_FINITE"),
        (PLAIN[:-1] + b"\0", "BAD_FRAME"),
        (PLAIN + PLAIN, "OUT_OF_RANGE"),
        (_encoded(Encoding(Codec.INT4, block=8)), "ENCODING_UNSUPPORTED"),
    ],
)
def test_a_part_is_refused_by_what_its_frames_hold(data: bytes, reason: str) -> None:
    with pytest.raises((SyncerError, FrameError)) as caught:
        _arrived(data)
    assert as_syncer_error(caught.value).reason == reason


def test_a_part_with_more_bytes_than_it_may_have_is_refused() -> None:
    with pytest.raises(SyncerError, match="too many bytes") as caught:
        _arrived(PLAIN, len(PLAIN) - 1)
    assert caught.value.reason == "TOO_LARGE"
