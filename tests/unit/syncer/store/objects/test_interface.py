"""What every object store owes to the rest, on each kind of store."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from skerry_syncer.store.errors import ObjectExistsError, ObjectMissingError
from skerry_syncer.store.objects.interface import STREAM_CHUNK_BYTES, Objects
from skerry_syncer.store.objects.local import MARKER
from tests.support.dict_objects import joined

LARGE = 40 * STREAM_CHUNK_BYTES + 17  # more than two pieces of a large upload


async def chunks_of(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


async def names_below(objects: Objects, prefix: str) -> dict[str, int]:
    return {info.name: info.size_bytes async for info in objects.list(prefix)}


async def test_a_name_is_created_once(objects: Objects) -> None:
    await objects.create("a/1", b"first")
    with pytest.raises(ObjectExistsError):
        await objects.create("a/1", b"second")
    assert await objects.get("a/1") == b"first"


async def test_of_many_creators_at_once_one_wins(objects: Objects) -> None:
    answers = await asyncio.gather(
        *(objects.create("log/1", b"%d" % number) for number in range(12)), return_exceptions=True
    )
    winners = [number for number, answer in enumerate(answers) if answer is None]
    assert len(winners) == 1
    assert all(isinstance(answer, ObjectExistsError) for answer in answers if answer is not None)
    assert await objects.get("log/1") == b"%d" % winners[0]


async def test_a_missing_object_is_said_to_be_missing(objects: Objects) -> None:
    await objects.create("a/b/1", b"")
    for name in ("a/b/2", "a/b", "c"):
        with pytest.raises(ObjectMissingError):
            await objects.get(name)
        with pytest.raises(ObjectMissingError):
            await joined(objects.stream(name))


async def test_parts_are_read_and_end_where_the_object_ends(objects: Objects) -> None:
    await objects.create("a", b"0123456789")
    for offset, rest in ((0, b"0123456789"), (3, b"3456789"), (10, b"")):
        assert await joined(objects.stream("a", offset=offset)) == rest


async def test_an_empty_object_is_an_object(objects: Objects) -> None:
    await objects.create("a", b"")
    await objects.write("b", chunks_of())
    assert await objects.get("a") == await objects.get("b") == await joined(objects.stream("b")) == b""


async def test_a_blob_of_many_pieces_comes_back_whole_and_in_bounded_pieces(objects: Objects) -> None:
    block = bytes(range(256)) * (STREAM_CHUNK_BYTES // 256)
    data = (block * (LARGE // len(block) + 1))[:LARGE]
    pieces = [data[start : start + 700_001] for start in range(0, LARGE, 700_001)]
    await objects.write("blobs/x", chunks_of(*pieces))
    read = [piece async for piece in objects.stream("blobs/x", offset=5)]
    assert b"".join(read) == data[5:]
    assert max(map(len, read)) <= STREAM_CHUNK_BYTES


async def test_a_blob_whose_source_fails_never_appears(objects: Objects) -> None:
    async def failing() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield bytes(STREAM_CHUNK_BYTES)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await objects.write("blobs/x", failing())
    assert await names_below(objects, "blobs") == {}


async def test_listing_shows_what_is_below_a_folder_and_nothing_beside_it(objects: Objects) -> None:
    for name in ("runs/a/1", "runs/a/b/2", "runs/ab/3", "other"):
        await objects.create(name, name.encode())
    assert await names_below(objects, "runs/a") == {"runs/a/1": 8, "runs/a/b/2": 10}
    assert await names_below(objects, "runs/none") == {}
    assert await objects.folders("runs") == ["a", "ab"]
    assert await objects.folders("runs/none") == []


async def test_deleting_passes_over_what_is_gone(objects: Objects) -> None:
    for name in ("a/1", "a/2", "b/1"):
        await objects.create(name, b"x")
    await objects.delete(["a/0", "a/1", "b/1", "c/d/e"])
    left = await names_below(objects, "")
    assert {name: size for name, size in left.items() if name != MARKER} == {"a/2": 1}
    await objects.create("b/1", b"y")
    assert await objects.get("b/1") == b"y"


@pytest.mark.parametrize("name", ["../a", "a/../b", "/a", "a//b", "a/", "", ".", "a\0b", "a b", "é"])
async def test_names_that_could_leave_the_store_are_refused(objects: Objects, name: str) -> None:
    with pytest.raises(ValueError, match="name is not legal"):
        await objects.create(name, b"x")
    with pytest.raises(ValueError, match="name is not legal"):
        await objects.get(name)
