"""Large objects are read in bounded ranges, and a read that breaks off goes on where it stopped."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing

import pytest
from blake3 import blake3

from skerry.runtime.clock import Clock, SystemClock
from skerry.runtime.identifiers import SystemEntropy
from skerry.runtime.workers import InlineWorkers
from skerry_syncer.store.errors import StoreUnavailableError
from skerry_syncer.store.log.entries import ObjectRef
from skerry_syncer.store.objects.buckets import RANGE_BYTES, ObstoreObjects
from skerry_syncer.store.objects.interface import Objects
from skerry_syncer.store.objects.opening import open_objects
from skerry_syncer.store.versions.blobs import Blobs
from tests.simulation.virtual_time import VirtualClock, run_virtual
from tests.support.dict_objects import DictObjects
from tests.support.s3_relay import S3Relay, s3_relay

MIB = 2**20
RANGE = 2 * MIB
SIZE = 5 * MIB + 17  # more than two ranges


@pytest.fixture
def relay(s3_options: dict[str, str]) -> Iterator[S3Relay]:
    with s3_relay(s3_options["endpoint"]) as relay:
        yield relay


def data_of(size: int) -> bytes:
    return random.Random(size).randbytes(size)


async def written(objects: Objects, data: bytes, clock: Clock | None = None) -> tuple[Blobs, ObjectRef]:
    """Puts a blob, and returns it with what reads it."""
    clock = clock or SystemClock()
    blobs = Blobs(objects, "run", clock, SystemEntropy(), workers=InlineWorkers(), condemned=set())
    await objects.write("run/updates/a", data)
    return blobs, ObjectRef("updates/a", 0, 1, len(data), blake3(data).hexdigest())


def bucket(relay: S3Relay, s3_options: dict[str, str], range_bytes: int = RANGE) -> Objects:
    prefix = f"s3://skerry-test/{os.getpid()}-{random.getrandbits(32):x}"
    objects = open_objects(prefix, options={**s3_options, "endpoint": relay.endpoint})
    assert isinstance(objects, ObstoreObjects)
    return ObstoreObjects(objects.store, range_bytes=range_bytes)


async def read(blobs: Blobs, ref: ObjectRef) -> bytes:
    return b"".join([piece async for piece in blobs.read_checked(ref)])


async def test_a_small_object_takes_one_request(relay: S3Relay, s3_options: dict[str, str]) -> None:
    blobs, ref = await written(bucket(relay, s3_options, RANGE_BYTES), data_of(8 * MIB + 300))
    relay.requests.clear()
    await read(blobs, ref)
    assert [method for method, _, _ in relay.requests] == ["GET"]


async def test_a_part_of_an_object_takes_one_request(relay: S3Relay, s3_options: dict[str, str]) -> None:
    objects = bucket(relay, s3_options)
    await written(objects, data_of(MIB))
    relay.requests.clear()
    assert await objects.get("run/updates/a", length=1000) == data_of(MIB)[:1000]
    assert [method for method, _, _ in relay.requests] == ["GET"]


async def test_a_large_object_is_read_in_ranges_several_at_once(relay: S3Relay, s3_options: dict[str, str]) -> None:
    data = data_of(SIZE)
    blobs, ref = await written(bucket(relay, s3_options), data)
    assert await read(blobs, ref) == data
    bounds = [tuple(map(int, asked.removeprefix("bytes=").split("-"))) for asked in relay.reads("updates/a")]
    assert len(bounds) == -(-SIZE // RANGE)
    assert max(last + 1 - first for first, last in bounds) <= RANGE
    assert relay.most_reads_at_once > 1


async def test_a_read_that_is_cut_every_few_bytes_ends(relay: S3Relay, s3_options: dict[str, str]) -> None:
    data = data_of(SIZE)
    blobs, ref = await written(bucket(relay, s3_options), data)
    relay.cut_bytes = 400_000
    assert await read(blobs, ref) == data


async def test_what_many_readers_read_ahead_is_bounded(relay: S3Relay, s3_options: dict[str, str]) -> None:
    blobs, ref = await written(bucket(relay, s3_options), data_of(4 * RANGE))
    async with AsyncExitStack() as stack:
        readers = [blobs.read(ref) for _ in range(6)]
        for reader in readers:
            assert isinstance(reader, AsyncGenerator)
            await stack.enter_async_context(aclosing(reader))
            await anext(reader)
        await asyncio.sleep(1.0)
        assert len(readers) < len(relay.reads("updates/a")) <= len(readers) + 8


class CutObjects(DictObjects):
    """Objects whose reads end with an error after `cut_bytes`, and then fail a number of times at once."""

    def __init__(self, cut_bytes: int, failure_count: int) -> None:
        super().__init__()
        self.cut_bytes, self.failure_count = cut_bytes, failure_count
        self.read_count = self._left = 0

    async def stream(self, name: str, *, offset: int = 0) -> AsyncIterator[bytes]:
        self.read_count += 1
        if self._left:
            self._left -= 1
            raise StoreUnavailableError("cut")
        self._left = self.failure_count
        data = await self.get(name, offset=offset)
        if data[: self.cut_bytes]:
            yield data[: self.cut_bytes]
        if len(data) > self.cut_bytes:
            raise StoreUnavailableError("cut")


def test_a_read_goes_on_at_its_offset_when_the_store_is_back() -> None:
    async def main() -> None:
        blobs, ref = await written(CutObjects(cut_bytes=100, failure_count=3), data_of(1000), VirtualClock())
        assert await read(blobs, ref) == data_of(1000)

    run_virtual(main)


def test_a_read_does_not_wait_for_ever_and_one_that_has_not_begun_not_at_all() -> None:
    async def main() -> None:
        clock = VirtualClock()
        objects = CutObjects(cut_bytes=100, failure_count=1000)
        blobs, ref = await written(objects, data_of(1000), clock)
        with pytest.raises(StoreUnavailableError):
            await read(blobs, ref)
        assert 5 < clock.monotonic_s() < 30
        objects.read_count = 0
        with pytest.raises(StoreUnavailableError):
            await read(blobs, ref)
        assert objects.read_count == 1

    run_virtual(main)
