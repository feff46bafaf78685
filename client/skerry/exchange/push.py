"""A delta of a fragment: encoded once into parts, so that the same bytes can be sent again, and pushed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from blake3 import blake3

from skerry.algorithm.rebase import FlatArray, Ledger, Trained
from skerry.errors import error_of
from skerry.exchange.session import Calls, Session
from skerry.model.interface import EncodeFrames
from skerry.v1 import exchange_pb2 as v1
from skerry.wire import Encoding, FragmentLayout
from skerry.wire.codecs import cut_parts
from skerry.wire.digests import delta_digest

# Bytes of frames in one message: what gRPC moves fastest, and well below its default limit.
MESSAGE_SIZE_BYTES: Final = 2**20
_LANE_COUNT: Final = 8  # more are no faster, since a learner keeps its connections from one push to the next


@dataclass(frozen=True)
class Part:
    """A range of a delta as it travels."""

    first: int
    numel: int
    digest: bytes  # BLAKE3 of the frames' uncompressed bytes
    frames: tuple[bytes, ...]


@dataclass(frozen=True)
class Delta:
    """All that a push sends of a delta, and when the weights were copied for it."""

    header: v1.PushHeader  # without seen_position, which is the sender's at the time
    parts: tuple[Part, ...]  # none once the delta is acknowledged: its bytes are not sent again
    digest: bytes
    taken_at_s: float
    last_step: int = 0  # of this process, when the weights were copied

    @property
    def delta_id(self) -> str:
        """Its id."""
        return self.header.delta_id

    @property
    def is_own(self) -> bool:
        """Whether this process has made it, and not one before it."""
        return bool(self.header.session_id)

    def without_parts(self) -> Delta:
        """Returns the delta without its bytes."""
        return replace(self, parts=())


def make_delta(
    session: Session, layout: FragmentLayout, ledger: Ledger, weights: FlatArray, *, trained: Trained, taken_at_s: float
) -> tuple[Delta, FlatArray]:
    """Returns what is unsent at `weights` as a delta, and what its receiver will decode; for a worker.

    `weights` are those after the steps of `trained`; they are written to, and become what is decoded: no other vector
    of this size is touched, since the kernel would spend longer on its page faults than all arithmetic takes.

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
    return Delta(header, parts, digest_of(parts), taken_at_s, trained.step_count), weights


def earlier_delta(session: Session, layout: FragmentLayout, delta_id: str, *, last_step: int) -> Delta:
    """Returns an accepted delta of an earlier session, to ask for its fate."""
    header = v1.PushHeader(
        run=session.settings.run,
        run_uid=session.run_uid,
        learner_id=session.settings.learner_id,
        delta_id=delta_id,
        fragment=layout.name,
    )
    return Delta(header, (), b"", asyncio.get_running_loop().time(), last_step)


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


def digest_of(parts: tuple[Part, ...]) -> bytes:
    """Returns the digest of a delta with these parts."""
    return delta_digest([(part.first, part.numel, part.digest) for part in parts])


async def push(
    calls: Calls,
    delta: Delta,
    *,
    seen_position: int,
    stored: Collection[tuple[int, int, bytes]],
    count_bytes: Callable[[int], None],
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
    is_open = True

    def count(size_bytes: int) -> None:
        if is_open:
            guard.reschedule(loop.time() + calls.stall_timeout_s)
        count_bytes(size_bytes)

    header = v1.PushHeader()
    header.CopyFrom(delta.header)
    header.seen_position = seen_position
    missing = [part for part in delta.parts if (part.first, part.numel, part.digest) not in stored]
    attempt = _Attempt(calls, header, missing, delta.digest, count, is_repeated=is_repeated)
    try:
        async with asyncio.timeout(calls.stall_timeout_s) as guard:
            try:
                return await attempt.run()
            finally:
                is_open = False
    except TimeoutError as error:
        raise error_of("TIMEOUT", f"push made no progress. delta={delta.delta_id}") from error


class _Attempt:
    """The calls of one attempt to push parts of a delta."""

    def __init__(
        self,
        calls: Calls,
        header: v1.PushHeader,
        parts: Sequence[Part],
        digest: bytes,
        count: Callable[[int], None],
        *,
        is_repeated: bool,
    ) -> None:
        self._calls = calls
        self._header = header
        self._waiting = deque(parts)
        self._digest = digest
        self._count = count
        size_bytes = sum(len(frame) for part in self._waiting for frame in part.frames)
        most = min(calls.lane_count, _LANE_COUNT, 1 + size_bytes // calls.lane_bytes)
        self._lane_count = 1 if is_repeated else most
        self._others: list[asyncio.Task[Any]] = []

    async def run(self) -> v1.PushDeltaResponse:
        """Returns the answer to the first call; raises the first one's error if one failed, when all have ended."""
        first = asyncio.create_task(self._lane(is_first=True))
        self._others += [asyncio.create_task(self._lane(is_first=False)) for _ in range(1, self._lane_count)]
        answer, *answers = await asyncio.gather(first, *self._others, return_exceptions=True)
        for one in (answer, *answers):
            if isinstance(one, BaseException):
                raise one
        return first.result()

    async def _lane(self, *, is_first: bool) -> v1.PushDeltaResponse:
        return await self._calls.transport.push_delta(self._requests(is_first=is_first))

    async def _requests(self, *, is_first: bool) -> AsyncIterator[v1.PushDeltaRequest]:
        yield v1.PushDeltaRequest(header=self._header)
        while self._waiting:
            part = self._waiting.popleft()
            for request in part_requests(part):
                self._count(len(request.data))
                yield request
        if is_first and await self._have_others_ended():
            yield v1.PushDeltaRequest(complete=v1.PushComplete(digest=self._digest))

    async def _have_others_ended(self) -> bool:
        """Waits for the end of the other calls; returns whether all have succeeded."""
        if self._others:
            await asyncio.wait(self._others)
        return not any(one.cancelled() or one.exception() for one in self._others)


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


def part_requests(part: Part) -> Iterator[v1.PushDeltaRequest]:
    """Yields the messages of one part."""
    size_bytes = sum(map(len, part.frames))
    yield v1.PushDeltaRequest(part=v1.PartBegin(first=part.first, numel=part.numel, size_bytes=size_bytes))
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
