"""Receives pushed deltas: turns bytes into checked, durable parts, and parts into an accepted delta in the log.

Of a push only the part that is arriving and the one before it, which is being stored, are held in memory, within the
process's byte budget. Its stream is not read until there is room for a whole part. A refused push leaves only parts
that no log entry names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from msgspec import structs

from skerry.wire.codecs import Codec
from skerry.wire.digests import DIGEST_SIZE, delta_digest
from skerry.wire.errors import FrameError
from skerry.wire.frames import FrameBatch, FrameReader
from skerry.wire.layout import check_id, check_name
from skerry_syncer.access.caller import CALLER, author
from skerry_syncer.access.limits import SCARCE_GRACE_S, SCARCE_PART_S, Unfinished, check_size, patience_s
from skerry_syncer.errors import SyncerError, bad_request, from_rejection, from_wire
from skerry_syncer.run.lifecycle import uid_of_draft
from skerry_syncer.run.parts import (
    FRAME_COST_NUMEL,
    INLINE_CHECK_BYTES,
    INLINE_CHECK_NUMEL,
    ByteBudget,
    PartChecker,
    PartSummary,
    Reservation,
)
from skerry_syncer.run.replica import RunReplica
from skerry_syncer.store.log.checks import check_push
from skerry_syncer.store.log.entries import INITIAL_BASE, AcceptedItem
from skerry_syncer.store.log.run_log import AppendTooLargeError
from skerry_syncer.store.log.state import DeltaState
from skerry_syncer.store.versions.blobs import StoredPart, StoredParts, summed_norms

# The most bytes that an interrupted push has to send again; a small share of a process's budget.
SUGGESTED_PART_BYTES: Final = 4 * 2**20
MAX_PART_BYTES: Final = 32 * 2**20
# Clients send messages of about this size; bytes count once the whole message is there.
_MESSAGE_BYTES: Final = 2**20
# Elements of a part of incompressible 4-bit codes. Frames that decode to more cost the syncer far more than the sender.
MAX_PART_NUMEL: Final = 2 * MAX_PART_BYTES
# Elements that a frame has on average, apart from one a tensor and these: a frame costs as much as hundreds of them.
_LEAST_FRAME_NUMEL: Final = 64
_LEAST_FRAMES: Final = 16
# The most that frames of one element each take, for clients that do not say how large a part is.
_MOST_BYTES_AN_ELEMENT: Final = 64
# A part's frames are kept for the merge if they decompress to at most this many times its stated size.
_MOST_KEPT_TIMES: Final = 2
_DELTA_CODECS: Final = frozenset(Codec)
_WEIGHT_CODECS: Final = frozenset({Codec.FLOAT32})  # version 0 is exact
# Larger than the count of any valid header, and small enough that one delta can't outweigh all others.
MAX_STEPS: Final = 2**32
MAX_TOKENS_A_STEP: Final = 2**32
MAX_TOKENS: Final = 2**53  # counts above it are not exact as float64


@dataclass
class _Arriving:
    """The part whose bytes are arriving."""

    first: int
    numel: int
    checker: PartChecker
    reader: FrameReader
    reservation: Reservation
    most_frames: int
    frames: list[bytes | memoryview] = field(default_factory=list)
    size_bytes: int = 0
    waited_s: float = 0.0  # for its client

    def feed(self, data: bytes | memoryview) -> None:
        """Checks the frames that `data` completes; slow enough for a worker thread."""
        self.checker.check(self.cut(data))

    def cut(self, data: bytes | memoryview) -> list[FrameBatch]:
        """Returns the frames that `data` completes, of which the headers are checked alone."""
        try:
            batches = self.reader.feed(data)
        except FrameError as error:
            raise from_wire(error) from error
        self.frames += [batch.data for batch in batches]
        if len(self.frames) > self.most_frames:
            raise SyncerError("TOO_LARGE", f"part has too many frames; make them larger. limit={self.most_frames}")
        return batches

    def summary(self, digest: bytes) -> PartSummary:
        """Returns what is known of the part, which must be whole and have this digest."""
        try:
            self.reader.finish()
        except FrameError as error:
            raise from_wire(error) from error
        summary = self.checker.summary()
        if summary.digest != digest:
            raise SyncerError(
                "DIGEST_MISMATCH", f"part digest mismatch. expected={digest.hex()}, actual={summary.digest.hex()}"
            )
        return summary


class Push:
    """One call of PushDelta. Call the methods in the order of the messages, and `abandon` at the end in any case."""

    def __init__(self, replica: RunReplica, header: AcceptedItem, budget: ByteBudget, drafts: Unfinished) -> None:
        """Takes what `begin_push` has checked: the item that the push is to append, without its parts and digest."""
        self._replica = replica
        self._header = header
        self.layout = replica.state.fragments[header.fragment].layout
        self._budget = budget
        self.sender = CALLER.get().identity or header.session
        self._is_initial = header.base_version == INITIAL_BASE
        # Where its bytes count until the draft is committed or the delta accepted, as whose and for what.
        self._unfinished, self._owner, self._counts_for = (
            (drafts, author(), replica.log.spec.uid)
            if self._is_initial
            else (replica.orphans, self.sender, header.delta)
        )
        self._arriving: _Arriving | None = None
        self._storing: tuple[asyncio.Task[None], Reservation] | None = None  # the part before it
        # Shared by all open calls of the delta, so that the one that completes it need not list the store.
        self._stored = replica.stored_parts.setdefault((header.fragment, header.delta), StoredParts())

    @property
    def known(self) -> DeltaState | None:
        """The delta, if it is accepted already: then bytes are ignored, and only the digest is compared."""
        return self._replica.state.deltas.get(self._header.delta)

    @property
    def patience_s(self) -> float | None:
        """How long the client may still take for the part that it sends; None if no part holds memory."""
        part = self._arriving
        if part is None or not part.reservation.size_bytes:
            return None
        patient_s = patience_s(part.size_bytes)
        if self._budget.is_scarce:
            whole = min(part.reservation.size_bytes, 4 * part.numel)  # which a client need not state
            due = min(whole, part.size_bytes + _MESSAGE_BYTES) / max(whole, SUGGESTED_PART_BYTES)
            patient_s = min(patient_s, SCARCE_GRACE_S + SCARCE_PART_S * due)
        return patient_s - part.waited_s

    def waited(self, wait_s: float) -> None:
        """Counts time in which the client sent nothing."""
        if self._arriving is not None:
            self._arriving.waited_s += wait_s

    async def abandon(self) -> None:
        """Releases the memory of the parts that are not stored yet; stored ones stay."""
        if self._arriving is not None:
            self._arriving.reservation.release()
            self._arriving = None
        if self._storing is not None:
            task, reservation = self._storing
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            reservation.release()  # if it was cancelled before it began

    async def begin_part(self, first: int, numel: int, size_bytes: int) -> None:
        """Begins the part `[first, first + numel)` of `size_bytes`, 0 if not stated; waits for memory for all of it.

        Raises:
            SyncerError: OUT_OF_RANGE; TOO_LARGE; QUOTA_EXCEEDED; BAD_REQUEST: the part before has no end.
            StoreError: the part before could not be stored.
        """
        if self._arriving is not None:
            raise bad_request("a part began before the one before it ended")
        if first < 0 or numel < 1 or first + numel > self.layout.numel:
            raise SyncerError(
                "OUT_OF_RANGE",
                f"part is outside the fragment. first={first}, numel={numel}, fragment_numel={self.layout.numel}",
            )
        if not 0 <= size_bytes <= MAX_PART_BYTES:
            raise SyncerError(
                "TOO_LARGE", f"part's size is out of range. size_bytes={size_bytes}, limit={MAX_PART_BYTES}"
            )
        if numel > MAX_PART_NUMEL:
            raise SyncerError("TOO_LARGE", f"part has too many elements. numel={numel}, limit={MAX_PART_NUMEL}")
        most_bytes = size_bytes or min(MAX_PART_BYTES, numel * _MOST_BYTES_AN_ELEMENT)
        self._unfinished.check(self._owner, self._stored_bytes(numel, most_bytes))
        if not self._budget.has_room(most_bytes):
            await self.all_stored()  # while memory is scarce, a push holds one part
        codecs = _WEIGHT_CODECS if self._is_initial else _DELTA_CODECS
        self._arriving = _Arriving(
            first,
            numel,
            PartChecker(self.layout, numel, codecs=codecs, most_kept_bytes=_MOST_KEPT_TIMES * size_bytes),
            FrameReader(first, numel),
            # The bytes of a delta that is known are ignored.
            await self._budget.reserve(self.sender, most_bytes if self.known is None else 0),
            len(self.layout.tensors) + _LEAST_FRAMES + numel // _LEAST_FRAME_NUMEL,
        )

    async def feed(self, data: bytes | memoryview) -> None:
        """Takes bytes of the part's frames, cut anywhere.

        Raises:
            SyncerError: BAD_FRAME, NON_FINITE, OUT_OF_RANGE, ENCODING_UNSUPPORTED, TOO_LARGE.
        """
        part = self._arriving
        if part is None:
            raise bad_request("data came before its part began")
        if self.known is not None:
            return
        part.size_bytes += len(data)
        if part.size_bytes > part.reservation.size_bytes:
            raise SyncerError("TOO_LARGE", f"part has too many bytes. limit={part.reservation.size_bytes}")
        if len(data) >= INLINE_CHECK_BYTES:
            await self._replica.workers.run(part.feed, data)
            return
        batches = part.cut(data)
        if sum(batch.numel + FRAME_COST_NUMEL for batch in batches) < INLINE_CHECK_NUMEL:
            part.checker.check(batches)
        else:
            await self._replica.workers.run(part.checker.check, batches)

    async def end_part(self, digest: bytes) -> None:
        """Begins to make the part durable, once the one before is; `complete` waits for all.

        Raises:
            SyncerError: BAD_FRAME: the part is incomplete; DIGEST_MISMATCH.
            StoreError: the part before could not be stored.
        """
        part = self._arriving
        if part is None:
            raise bad_request("a part ended before it began")
        summary = part.summary(digest) if self.known is None else None
        await self.all_stored()
        self._arriving = None
        if summary is None:
            part.reservation.release()
        else:
            self._storing = asyncio.create_task(self._store(part, summary)), part.reservation

    async def all_stored(self) -> None:
        """Returns when no part is being stored; raises if the last one could not be."""
        if self._storing is not None:
            await self._storing[0]
            self._storing = None

    async def _store(self, part: _Arriving, summary: PartSummary) -> None:
        try:
            stored = await self._replica.log.blobs.write_part(
                self._header.fragment,
                self._header.delta,
                part.first,
                part.numel,
                summary.digest.hex(),
                summary.squared_norms,
                part.frames,
                summary.kept,
            )
            self._stored[part.first, part.numel] = stored
            # With its header, which has a number for each tensor of the fragment.
            size_bytes = self._stored_bytes(part.numel, stored.ref.size_bytes)
            self._unfinished.stored(self._owner, self._counts_for, size_bytes)
        finally:
            part.reservation.release()

    def _stored_bytes(self, numel: int, size_bytes: int) -> int:
        """Returns what a part takes of the store: initial weights are stored as version 0 too."""
        return size_bytes + 4 * numel if self._is_initial else size_bytes

    async def complete(self, digest: bytes) -> DeltaState:
        """Puts the delta into the log and returns it; the same push again returns the same delta.

        Raises:
            SyncerError: INCOMPLETE; OUT_OF_RANGE: parts overlap; DIGEST_MISMATCH, ID_REUSED; TOO_LARGE: too many parts;
                or why the log does not admit it.
            StoreError: the store failed, now or with a part; the same push may be repeated.
        """
        if self._arriving is not None:
            raise bad_request("the push was completed inside a part")
        await self.all_stored()
        if len(digest) != DIGEST_SIZE:
            raise bad_request(f"digest must have {DIGEST_SIZE} bytes. actual={len(digest)}")
        if self.known is None:
            await self._accept(await self._parts(), digest)
        known = self.known
        assert known is not None  # it was accepted, just now or before
        if (known.item.digest, known.item.fragment) != (digest.hex(), self._header.fragment):
            raise SyncerError("ID_REUSED", f"delta id was used for other bytes. delta={self._header.delta}")
        return known

    async def _parts(self) -> Sequence[StoredPart]:
        """Returns the parts that cover the fragment: this call's, and what earlier calls made durable."""
        chosen = dict(self._stored)
        if not _covers(chosen, self.layout.numel):
            for part in await self._replica.log.blobs.list_parts(self._header.fragment, self._header.delta):
                key = (part.ref.first, part.ref.numel)
                other = chosen.setdefault(key, part)
                if other.ref.digest != part.ref.digest and key not in self._stored:
                    raise SyncerError("ID_REUSED", f"delta id was used for other bytes. delta={self._header.delta}")
        if not _covers(chosen, self.layout.numel):
            facts = (
                f"fragment_numel={self.layout.numel}, "
                f"stored={[f'{first}+{numel}' for first, numel in sorted(chosen)][:20]}"
            )
            if _overlap(chosen):
                raise SyncerError(
                    "OUT_OF_RANGE", f"parts overlap; send all parts in one call, or use a new delta id. {facts}"
                )
            raise SyncerError("INCOMPLETE", f"parts are missing. {facts}")
        return [chosen[key] for key in sorted(chosen)]

    async def _accept(self, parts: Sequence[StoredPart], digest: bytes) -> None:
        actual = delta_digest([(p.ref.first, p.ref.numel, bytes.fromhex(p.ref.digest)) for p in parts])
        if actual != digest:
            raise SyncerError(
                "DIGEST_MISMATCH", f"delta digest mismatch. expected={digest.hex()}, actual={actual.hex()}"
            )
        norms = summed_norms(parts, len(self.layout.tensors))
        refs = tuple(part.ref for part in parts)
        item = structs.replace(self._header, digest=digest.hex(), parts=refs, squared_norms=norms)
        try:
            (outcome,) = await self._replica.log.append([item])
        except AppendTooLargeError as error:
            raise SyncerError("TOO_LARGE", f"too many parts; make them larger. parts={len(parts)}") from error
        if outcome.rejection is not None and outcome.rejection.reason != "REPEATED":
            raise from_rejection(
                outcome.rejection, **_other_delta(self._replica, self._header, outcome.rejection.reason)
            )


def _covers(parts: dict[tuple[int, int], StoredPart], numel: int) -> bool:
    """Whether the ranges follow one another from 0 to `numel`, without a gap or an overlap."""
    at = 0
    for first, count in sorted(parts):
        if first != at:
            return False
        at += count
    return at == numel


def _overlap(parts: Iterable[tuple[int, int]]) -> bool:
    """Whether two of the ranges have an element in common."""
    return any(first + count > other for (first, count), (other, _) in pairwise(sorted(parts)))


async def begin_push(replica: RunReplica, header: AcceptedItem, budget: ByteBudget, drafts: Unfinished) -> Push:
    """Returns a push for a valid header; a delta of enough steps announces its round to all attached learners.

    Initial weights count among `drafts`. The log is folded to its end before a header is refused.

    Raises:
        BadNameError: a name or id is not legal.
        SyncerError: the header is refused, for any reason that PushDelta lists.
    """
    _check_fields(replica, header)
    state = replica.state
    if check_push(state, header) is not None:
        await replica.log.tail()
    rejection = check_push(state, header)
    if rejection is not None:
        raise from_rejection(rejection, **_other_delta(replica, header, rejection.reason))
    if header.delta not in state.deltas:
        check_size(replica.log.blobs)
        if header.base_version != INITIAL_BASE:
            replica.push_begun(header.fragment, header.learner, header.session, header.step_count)
    return Push(replica, header, budget, drafts)


def _check_fields(replica: RunReplica, header: AcceptedItem) -> None:
    check_name(header.learner, "learner")
    check_id(header.session, "session id")
    check_id(header.delta, "delta id")
    if header.fragment not in replica.state.fragments:
        raise SyncerError("FRAGMENT_NOT_FOUND", f"no such fragment in the run. fragment={header.fragment[:80]!r}")
    if header.base_version < INITIAL_BASE:
        raise bad_request(f"base_version must be -1 or more. base_version={header.base_version}")
    if header.base_version == INITIAL_BASE:
        spec = replica.log.spec
        if uid_of_draft(spec.name, header.session) != spec.uid:
            raise SyncerError("SESSION_UNKNOWN", "only the draft's creator may push its initial weights")
        return
    if len(header.base_digest) != 2 * DIGEST_SIZE:
        raise bad_request(f"base_digest must have {DIGEST_SIZE} bytes. actual={len(header.base_digest) // 2}")
    for name, value, limit in (
        ("step_count", header.step_count, MAX_STEPS),
        ("token_count", header.token_count, min(MAX_TOKENS, header.step_count * MAX_TOKENS_A_STEP)),
    ):
        if value < 1:
            raise bad_request(f"{name} must be at least 1. {name}={value}")
        if value > limit:
            raise bad_request(f"{name} is larger than any valid report. {name}={value}, limit={limit}")
    if header.step_count > header.last_step:
        raise bad_request(
            f"step_count must be at most last_step. step_count={header.step_count}, last_step={header.last_step}"
        )


def _other_delta(replica: RunReplica, header: AcceptedItem, reason: str) -> dict[str, str]:
    base = header.session, header.fragment, header.base_version
    other = replica.state.bases.get(base) if reason == "BASE_REPEATED" else None
    return {} if other is None else {"delta_id": other}
