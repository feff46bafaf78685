"""Large objects are read in bounded ranges, and a read that breaks off goes on where it stopped."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
from blake3 import blake3

from skerry.runtime.identifiers import SystemEntropy
from skerry.runtime.workers import InlineWorkers
from skerry_syncer.store.log.entries import ObjectRef
from skerry_syncer.store.objects.buckets import RANGE_BYTES, ObstoreObjects
from skerry_syncer.store.objects.interface import Objects
from skerry_syncer.store.objects.opening import open_objects
from skerry_syncer.store.versions.blobs import Blobs
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


async def written(objects: Objects, data: bytes) -> tuple[Blobs, ObjectRef]:
    """Puts a blob, and returns it with what reads it."""
    blobs = Blobs(objects, "run", SystemEntropy(), workers=InlineWorkers(), condemned=set())
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


async def test_a_large_object_is_read_in_ranges(relay: S3Relay, s3_options: dict[str, str]) -> None:
    data = data_of(SIZE)
    blobs, ref = await written(bucket(relay, s3_options), data)
    assert await read(blobs, ref) == data
    bounds = [tuple(map(int, asked.removeprefix("bytes=").split("-"))) for asked in relay.reads("updates/a")]
    assert len(bounds) == -(-SIZE // RANGE)
    assert max(last + 1 - first for first, last in bounds) <= RANGE


async def test_a_read_goes_on_where_its_connection_breaks(relay: S3Relay, s3_options: dict[str, str]) -> None:
    data = data_of(SIZE)
    blobs, ref = await written(bucket(relay, s3_options), data)
    relay.cut_bytes = RANGE * 6 // 10
    assert await read(blobs, ref) == data
