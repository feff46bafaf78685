"""A delta on its way: encoded once into parts, and sent as the messages of a push, again and again if it must be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol

from skerry.client.errors import error_of
from skerry.client.transport import Transport
from skerry.v1 import exchange_pb2 as v1
from skerry.wire import Encoding, FragmentLayout, Hasher, cut_parts, delta_digest, part_digest

# Bytes of frames in one message: what gRPC moves fastest, and well below its default limit.
MESSAGE_SIZE_BYTES: Final = 2**20
DEFAULT_PART_SIZE_BYTES: Final = 8 * 2**20


class EncodeFrames(Protocol):
    """`skerry.wire.encode_frames`, or its equal for arrays on a device."""

    def __call__(
        self,
        values: Any,
        layout: FragmentLayout,
        encoding: Encoding,
        *,
        first: int = 0,
        decoded: Any = None,
        digest: Hasher | None = None,
    ) -> Iterator[bytes]:
        """Yields whole frames covering the values."""


@dataclass(frozen=True)
class Part:
    """A range of a delta as it travels; immutable, so that it can be sent again."""

    first: int
    numel: int
    digest: bytes  # SHA-256 of the frames' uncompressed bytes
    frames: tuple[bytes, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of its frames."""
        return sum(len(frame) for frame in self.frames)


@dataclass(frozen=True)
class EncodedDelta:
    """All that a push sends of a delta."""

    header: v1.PushHeader  # without seen_position, which is the caller's at the time
    parts: tuple[Part, ...]
    digest: bytes


def encode_delta(
    encode: EncodeFrames,
    values: Any,  # (numel,) float32, overwritten with what the receiver decodes
    layout: FragmentLayout,
    encoding: Encoding,
    part_size_bytes: int,
) -> tuple[Part, ...]:
    """Returns the delta's parts, none of which is larger than `part_size_bytes` even where nothing compresses.

    Raises:
        NonFiniteError: a value that can't be encoded.
    """
    parts = []
    for first, numel in cut_parts(layout, encoding, part_numel(encoding, part_size_bytes)):
        digest = part_digest()
        piece = values[first : first + numel]
        frames = tuple(encode(piece, layout, encoding, first=first, decoded=piece, digest=digest))
        parts.append(Part(first, numel, digest.digest(), frames))
    return tuple(parts)


def part_numel(encoding: Encoding, part_size_bytes: int) -> int:
    """Returns how many elements surely fit a part, scales and headers of the smallest blocks included."""
    bits = max(encoding.codec.bits, encoding.vector_codec.bits if encoding.codec.has_blocks else 0)
    # Headers and scales come to well under an eighth more for every block size that the contract allows.
    return max(part_size_bytes * 8 * 7 // (8 * (bits + 2)), encoding.block)


def digest_of(parts: Iterable[Part]) -> bytes:
    """Returns the delta digest of its parts."""
    return delta_digest([(part.first, part.numel, part.digest) for part in parts])


async def push(
    transport: Transport,
    delta: EncodedDelta,
    *,
    seen_position: int,
    stored: Collection[tuple[int, int, bytes]],
    stall_timeout_s: float,
    count_bytes: Callable[[int], None],
) -> v1.PushDeltaResponse:
    """Sends what is not among the `stored` parts, and completes the push.

    However long it takes, it goes on while messages move; a stall of `stall_timeout_s` ends it.

    Raises:
        TryAgainError: TIMEOUT for a stall.
        SkerryError: as the server answered.
    """
    loop = asyncio.get_running_loop()
    is_open = True

    async def requests() -> AsyncIterator[v1.PushDeltaRequest]:
        for request in push_requests(delta, seen_position=seen_position, stored=stored):
            if is_open:
                guard.reschedule(loop.time() + stall_timeout_s)
            count_bytes(len(request.data))
            yield request

    try:
        async with asyncio.timeout(stall_timeout_s) as guard:
            try:
                return await transport.push_delta(requests())
            finally:
                is_open = False
    except TimeoutError as error:
        raise error_of("TIMEOUT", f"push made no progress. delta={delta.header.delta_id}") from error


def push_requests(
    delta: EncodedDelta, *, seen_position: int, stored: Collection[tuple[int, int, bytes]] = ()
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
