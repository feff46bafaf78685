"""A delta of a fragment: encoded once into parts, so that the same bytes can be sent again, and pushed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from blake3 import blake3

from skerry.algorithm.rebase import FlatArray, Ledger, Trained
from skerry.errors import error_of
from skerry.exchange.session import Calls, Session
from skerry.model.interface import EncodeFrames
from skerry.stats import Tally
from skerry.v1 import exchange_pb2 as v1
from skerry.wire import Encoding, FragmentLayout
from skerry.wire.codecs import cut_parts
from skerry.wire.digests import delta_digest

# Bytes of frames in one message: what gRPC moves fastest. A little less than a power of two, to which protobuf's
# buffer grows: where the message is just longer than that, it copies all to one of twice the size.
MESSAGE_SIZE_BYTES: Final = 2**19 - 64
_LANE_COUNT: Final = 8  # more are no faster, since a learner keeps its connections from one push to the next


@dataclass(frozen=True)
class Part:
    """A range of a delta as it travels."""

    first: int
    numel: int
    digest: bytes  # BLAKE3 of the frames' uncompressed bytes
    frames: tuple[bytes, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of its frames."""
        return sum(map(len, self.frames))


@dataclass(frozen=True)
class Delta:
    """All that a push sends of a delta, and when the weights were copied for it."""

    header: v1.PushHeader  # without seen_position, which is the sender's at the time
    parts: tuple[Part, ...]  # none once the delta is acknowledged: its bytes are not sent again
    taken_at_s: float = 0.0
    last_step: int = 0  # of this process, when the weights were copied

    @property
    def is_own(self) -> bool:
        """Whether this process has made it, and not one before it."""
        return bool(self.header.session_id)


def make_delta(
    session: Session, layout: FragmentLayout, ledger: Ledger, weights: FlatArray, *, trained: Trained, taken_at_s: float
) -> Delta:
    """Returns what is unsent at `weights` as a delta; for a worker.

    `weights` are those after the steps of `trained`. They are overwritten with what the receiver decodes: no other
    vector of this size is touched, since the kernel would spend longer on its page faults than all arithmetic takes.

    Raises:
        NonFiniteError: the weights, and so the delta, are not finite.
    """
    header = v1.PushHeader(
        run=session.settings.run,
        run_uid=session.run_uid,
        learner_id=session.settings.learner_id,
        session_id=session.session_id,
        delta_id=session.entropy.hex_id(),
        fragment=layout.name,
        base_version=ledger.version,
        base_digest=ledger.digest,
        step_count=trained.step_count - ledger.sent_until.step_count,
        token_count=trained.token_count - ledger.sent_until.token_count,
        last_step=session.earlier.step_count + trained.step_count,
    )
    session.parameters.synchronize()
    assert ledger.in_flight is None  # so equation (2) is A - theta
    encode, encoding = session.parameters.encode, session.policy.delta_encoding
    parts = encode_parts(encode, weights, layout, encoding, session.part_size_bytes, base=ledger.base)
    return Delta(header, parts, taken_at_s, trained.step_count)


def encode_parts(
    encode: EncodeFrames,
    values: Any,  # (numel,) float32, overwritten with what the receiver decodes
    layout: FragmentLayout,
    encoding: Encoding,
    part_size_bytes: int,
    *,
    base: FlatArray | None = None,
) -> tuple[Part, ...]:
    """Returns the parts of a delta, none larger than `part_size_bytes` even where nothing compresses.

    The delta is `values`, or base - values where `base` is given.

    Raises:
        NonFiniteError: a value that can't be encoded.
    """
    parts = []
    for first, numel in cut_parts(layout, encoding, part_size_bytes):
        digest = blake3()
        inside = slice(first, first + numel)
        piece, under = values[inside], None if base is None else base[inside]
        frames = tuple(encode(piece, layout, encoding, first=first, base=under, decoded=piece, digest=digest))
        parts.append(Part(first, numel, digest.digest(), frames))
    return tuple(parts)


async def push(
    calls: Calls,
    delta: Delta,
    *,
    seen_position: int,
    stored: Collection[tuple[int, int, bytes]],
    tally: Tally,
    is_repeated: bool = False,
) -> v1.PushDeltaResponse:
    """Sends what is not among the `stored` parts, and completes the push.

    One call for each `calls.lane_bytes` takes the parts in turns, because one TCP connection does not fill a long link.
    The first completes the push once the others have ended. If one fails, the others still bring what they can, for the
    next attempt, which is one call: on a slow link, a part that shares it with many would take too long for the syncer
    (TOO_SLOW), time after time. However long it takes, it goes on while messages move; a stall of
    `calls.stall_timeout_s` ends it.

    Raises:
        TryAgainError: TIMEOUT for a stall.
        SkerryError: as the server answered.
    """
    loop = asyncio.get_running_loop()
    header = v1.PushHeader()
    header.CopyFrom(delta.header)
    header.seen_position = seen_position
    waiting = deque(part for part in delta.parts if (part.first, part.numel, part.digest) not in stored)
    size_bytes = sum(part.size_bytes for part in waiting)
    most = 1 if is_repeated else min(calls.lane_count, _LANE_COUNT, 1 + size_bytes // calls.lane_bytes)
    others: list[asyncio.Task[v1.PushDeltaResponse]] = []
    is_open = True  # gRPC may ask for another request after the call has ended

    async def requests(*, is_first: bool) -> AsyncIterator[v1.PushDeltaRequest]:
        yield v1.PushDeltaRequest(header=header)
        while waiting:
            part = waiting.popleft()
            for request in part_requests(part):
                if is_open:
                    guard.reschedule(loop.time() + calls.stall_timeout_s)
                yield request
            tally.bytes_up += part.size_bytes
        if not is_first:
            return
        if others:
            await asyncio.wait(others)
        if not any(other.cancelled() or other.exception() for other in others):
            digest = delta_digest([(part.first, part.numel, part.digest) for part in delta.parts])
            yield v1.PushDeltaRequest(complete=v1.PushComplete(digest=digest))

    async def lane(*, is_first: bool) -> v1.PushDeltaResponse:
        return await calls.transport.push_delta(requests(is_first=is_first))

    try:
        async with asyncio.timeout(calls.stall_timeout_s) as guard:
            first = asyncio.create_task(lane(is_first=True))
            others += [asyncio.create_task(lane(is_first=False)) for _ in range(1, most)]
            for answer in await asyncio.gather(first, *others, return_exceptions=True):
                if isinstance(answer, BaseException):
                    raise answer
            return first.result()
    except TimeoutError as error:
        raise error_of("TIMEOUT", f"push made no progress. delta={delta.header.delta_id}") from error
    finally:
        is_open = False


def part_requests(part: Part) -> Iterator[v1.PushDeltaRequest]:
    """Yields the messages of one part."""
    yield v1.PushDeltaRequest(part=v1.PartBegin(first=part.first, numel=part.numel, size_bytes=part.size_bytes))
    for data in cut_messages(part.frames):
        yield v1.PushDeltaRequest(data=data)
    yield v1.PushDeltaRequest(part_end=v1.PartEnd(digest=part.digest))


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
