"""Sending a delta as the messages of a push, and asking how far it has come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from typing import Final

from skerry.client.calls import Calls
from skerry.client.delta import Delta
from skerry.client.errors import error_of
from skerry.v1 import exchange_pb2 as v1

# Bytes of frames in one message: what gRPC moves fastest, and well below its default limit.
MESSAGE_SIZE_BYTES: Final = 2**20


async def push(
    calls: Calls,
    delta: Delta,
    *,
    seen_position: int,
    stored: Collection[tuple[int, int, bytes]],
    count_bytes: Callable[[int], None],
) -> v1.PushDeltaResponse:
    """Sends what is not among the `stored` parts, and completes the push.

    However long it takes, it goes on while messages move; a stall of `calls.stall_timeout_s` ends it.

    Raises:
        TryAgainError: TIMEOUT for a stall.
        SkerryError: as the server answered.
    """
    loop = asyncio.get_running_loop()
    is_open = True

    async def requests() -> AsyncIterator[v1.PushDeltaRequest]:
        for request in push_requests(delta, seen_position=seen_position, stored=stored):
            if is_open:
                guard.reschedule(loop.time() + calls.stall_timeout_s)
            count_bytes(len(request.data))
            yield request

    try:
        async with asyncio.timeout(calls.stall_timeout_s) as guard:
            try:
                return await calls.transport.push_delta(requests())
            finally:
                is_open = False
    except TimeoutError as error:
        raise error_of("TIMEOUT", f"push made no progress. delta={delta.delta_id}") from error


async def query(calls: Calls, delta: Delta, *, seen_position: int) -> v1.QueryPushResponse:
    """Asks which parts are durable, and what the delta's fate is at `seen_position` or later."""
    request = v1.QueryPushRequest(
        run=delta.header.run,
        run_uid=delta.header.run_uid,
        seen_position=seen_position,
        fragment=delta.header.fragment,
        delta_id=delta.delta_id,
    )
    return await calls.transport.query_push(request, timeout_s=calls.timeout_s)


def push_requests(
    delta: Delta, *, seen_position: int, stored: Collection[tuple[int, int, bytes]] = ()
) -> Iterator[v1.PushDeltaRequest]:
    """Yields the messages of a push without the parts that are durable already."""
    header = v1.PushHeader()
    header.CopyFrom(delta.header)
    header.seen_position = seen_position
    yield v1.PushDeltaRequest(header=header)
    for part in delta.parts:
        if (part.first, part.numel, part.digest) in stored:
            continue
        yield v1.PushDeltaRequest(part=v1.PartBegin(first=part.first, numel=part.numel))
        for data in cut_messages(part.frames):
            yield v1.PushDeltaRequest(data=data)
        yield v1.PushDeltaRequest(part_end=v1.PartEnd(digest=part.digest))
    yield v1.PushDeltaRequest(complete=v1.PushComplete(digest=delta.digest))


def cut_messages(frames: Iterable[bytes], size_bytes: int = MESSAGE_SIZE_BYTES) -> Iterator[bytes]:
    """Yields the frames' bytes in pieces of `size_bytes`, the last one shorter."""
    waiting: list[memoryview] = []
    waiting_size = 0
    for frame in frames:
        rest = memoryview(frame)
        while waiting_size + len(rest) >= size_bytes:
            room = size_bytes - waiting_size
            yield b"".join((*waiting, rest[:room]))
            rest, waiting, waiting_size = rest[room:], [], 0
        if rest:
            waiting.append(rest)
            waiting_size += len(rest)
    if waiting:
        yield b"".join(waiting)
