"""Receives pushed deltas: turns bytes into checked, durable parts, and parts into an accepted delta in the log.

Of a push only the part that is arriving and the one before it, which is being stored, are held in memory, within the
process's byte budget. A refused push leaves only parts that no log entry names.

A delta is refused here for its header, in `parts` for its bytes, in `store.log.fold` (`check_push`, `check_accepted`)
for the state of the run. An accepted one may still be quarantined or expire, in `rounds.closing`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

from msgspec import structs

from skerry.wire.codecs import Codec
from skerry.wire.digests import DIGEST_SIZE, delta_digest
from skerry.wire.layout import check_id, check_name
from skerry_syncer.access.limits import patience_s
from skerry_syncer.errors import SyncerError, bad_request, from_rejection
from skerry_syncer.run.lifecycle import uid_of_draft
from skerry_syncer.run.parts import ArrivingPart, ByteBudget
from skerry_syncer.run.replica import RunReplica
from skerry_syncer.store.log.entries import INITIAL_BASE, AcceptedItem
from skerry_syncer.store.log.fold import check_push
from skerry_syncer.store.log.run_log import AppendTooLargeError
from skerry_syncer.store.log.state import DeltaState, Rejection
from skerry_syncer.store.versions.blobs import StoredPart, StoredParts, summed_norms

# The most bytes that an interrupted push has to send again; a small share of a process's budget.
SUGGESTED_PART_BYTES: Final = 4 * 2**20
MAX_PART_BYTES: Final = 32 * 2**20
# Between two parts a push holds no memory, so that its client may take longer.
_SILENCE_S: Final = 60.0
# Up to this many elements are decoded at once, because handing them to another thread would take longer.
_INLINE_NUMEL: Final = 2**15
_DELTA_CODECS: Final = frozenset(Codec)
_WEIGHT_CODECS: Final = frozenset({Codec.FLOAT32})  # version 0 is exact
MAX_COUNT: Final = 2**53  # of steps and tokens: counts above it are not exact as float64


class Push:
    """One call of PushDelta. Call the methods in the order of the messages, and `abandon` at the end in any case."""

    def __init__(self, replica: RunReplica, header: AcceptedItem, budget: ByteBudget, client: str) -> None:
        """Takes what `begin_push` has checked: the item that the push is to append, without its parts and digest."""
        self._replica = replica
        self._header = header
        self._layout = replica.fragment(header.fragment).layout
        self._budget = budget
        self._client = client
        self._arriving: ArrivingPart | None = None
        self._storing: asyncio.Task[None] | None = None  # the part before it
        # Shared by all open calls of the delta, so that the one that completes it need not list the store.
        self._stored = replica.stored_parts.setdefault((header.fragment, header.delta), StoredParts())

    @property
    def known(self) -> DeltaState | None:
        """The delta, if it is accepted."""
        return self._replica.state.deltas.get(self._header.delta)

    @property
    def patience_s(self) -> float:
        """How long the client may still take for the part that it sends, or to begin the next."""
        part = self._arriving
        return _SILENCE_S if part is None else patience_s(part.size_bytes) - part.waited_s

    def waited(self, wait_s: float) -> None:
        """Counts time in which the client sent nothing."""
        if self._arriving is not None:
            self._arriving.waited_s += wait_s

    async def abandon(self) -> None:
        """Releases the memory of the parts that are not stored yet; stored ones stay."""
        if self._arriving is not None:
            self._budget.release(self._client, self._arriving.limit_bytes)
            self._arriving = None
        if self._storing is not None:
            self._storing.cancel()
            await asyncio.gather(self._storing, return_exceptions=True)

    async def begin_part(self, first: int, numel: int, size_bytes: int) -> None:
        """Begins the part `[first, first + numel)` of `size_bytes`, 0 if not stated; waits for memory for all of it.

        Raises:
            SyncerError: OUT_OF_RANGE; TOO_LARGE; BAD_REQUEST: the part before has no end.
        """
        if self._arriving is not None:
            raise bad_request("a part began before the one before it ended")
        if first < 0 or numel < 1 or first + numel > self._layout.numel:
            raise SyncerError(
                "OUT_OF_RANGE",
                f"part is outside the fragment. first={first}, numel={numel}, fragment_numel={self._layout.numel}",
            )
        if not 0 <= size_bytes <= MAX_PART_BYTES:
            raise SyncerError(
                "TOO_LARGE", f"part's size is out of range. size_bytes={size_bytes}, limit={MAX_PART_BYTES}"
            )
        codecs = _WEIGHT_CODECS if self._header.base_version == INITIAL_BASE else _DELTA_CODECS
        part = ArrivingPart(self._layout, first, numel, codecs=codecs, limit_bytes=size_bytes or MAX_PART_BYTES)
        await self._budget.reserve(self._client, part.limit_bytes)
        self._arriving = part

    async def feed(self, data: bytes | memoryview) -> None:
        """Takes bytes of the part's frames, cut anywhere.

        Raises:
            SyncerError: ENCODING_UNSUPPORTED, TOO_LARGE.
            FrameError: the frames can't be decoded.
        """
        part = self._arriving
        if part is None:
            raise bad_request("data came before its part began")
        if part.numel <= _INLINE_NUMEL:
            part.feed(data)
        else:
            await self._replica.stored.workers.run(part.feed, data)

    async def end_part(self, digest: bytes) -> None:
        """Begins to make the part durable, once the one before is; `complete` waits for all.

        Raises:
            FrameError: the part is incomplete.
            SyncerError: DIGEST_MISMATCH.
            StoreError: the part before could not be stored.
        """
        part = self._arriving
        if part is None:
            raise bad_request("a part ended before it began")
        if (actual := part.finish()) != digest:
            raise SyncerError(
                "DIGEST_MISMATCH", f"part digest mismatch. expected={digest.hex()}, actual={actual.hex()}"
            )
        await self.all_stored()
        self._arriving = None
        self._storing = asyncio.create_task(self._store(part, digest.hex()))
        self._storing.add_done_callback(lambda _: self._budget.release(self._client, part.limit_bytes))

    async def all_stored(self) -> None:
        """Returns when no part is being stored; raises if the last one could not be."""
        if self._storing is not None:
            await self._storing
            self._storing = None

    async def _store(self, part: ArrivingPart, digest: str) -> None:
        self._stored[part.first, part.numel] = await self._replica.blobs.write_part(
            self._header.fragment,
            self._header.delta,
            part.first,
            part.numel,
            digest,
            part.squared_norms,
            part.frames,
            part.kept,
        )

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
            raise self._id_reused()
        return known

    async def _parts(self) -> Sequence[StoredPart]:
        """Returns the parts that cover the fragment: this call's, and what earlier calls made durable."""
        chosen = dict(self._stored)
        if not self._is_whole(chosen):
            for part in await self._replica.blobs.list_parts(self._header.fragment, self._header.delta):
                key = (part.ref.first, part.ref.numel)
                if chosen.setdefault(key, part).ref.digest != part.ref.digest and key not in self._stored:
                    raise self._id_reused()
        if not self._is_whole(chosen):
            facts = (
                f"fragment_numel={self._layout.numel}, "
                f"stored={[f'{first}+{numel}' for first, numel in sorted(chosen)][:20]}"
            )
            if _overlap(chosen):
                raise SyncerError(
                    "OUT_OF_RANGE", f"parts overlap; send all parts in one call, or use a new delta id. {facts}"
                )
            raise SyncerError("INCOMPLETE", f"parts are missing. {facts}")
        return [chosen[key] for key in sorted(chosen)]

    def _is_whole(self, parts: Iterable[tuple[int, int]]) -> bool:
        """Whether the ranges, which are inside the fragment, cover it once."""
        return sum(numel for _, numel in parts) == self._layout.numel and not _overlap(parts)

    async def _accept(self, parts: Sequence[StoredPart], digest: bytes) -> None:
        actual = delta_digest([(p.ref.first, p.ref.numel, bytes.fromhex(p.ref.digest)) for p in parts])
        if actual != digest:
            raise SyncerError(
                "DIGEST_MISMATCH", f"delta digest mismatch. expected={digest.hex()}, actual={actual.hex()}"
            )
        norms = summed_norms(parts, len(self._layout.tensors))
        refs = tuple(part.ref for part in parts)
        item = structs.replace(self._header, digest=digest.hex(), parts=refs, squared_norms=norms)
        try:
            (outcome,) = await self._replica.log.append([item])
        except AppendTooLargeError as error:
            raise SyncerError("TOO_LARGE", f"too many parts; make them larger. parts={len(parts)}") from error
        if outcome.rejection is not None and outcome.rejection.reason != "REPEATED":
            raise _refused(self._replica, self._header, outcome.rejection)

    def _id_reused(self) -> SyncerError:
        return SyncerError("ID_REUSED", f"delta id was used for other bytes. delta={self._header.delta}")


def _overlap(parts: Iterable[tuple[int, int]]) -> bool:
    """Whether two of the ranges have an element in common."""
    return any(first + count > other for (first, count), (other, _) in pairwise(sorted(parts)))


async def begin_push(replica: RunReplica, header: AcceptedItem, budget: ByteBudget, client: str) -> Push:
    """Returns a push for a valid header; a delta of enough steps announces its round to all attached learners.

    The log is folded to its end before a header is refused.

    Raises:
        BadNameError: a name or id is not legal.
        SyncerError: the header is refused, for any reason that PushDelta lists.
    """
    _check_fields(replica, header)
    if check_push(replica.state, header) is not None:
        await replica.log.tail()
    rejection = check_push(replica.state, header)
    if rejection is not None:
        raise _refused(replica, header, rejection)
    if header.delta not in replica.state.deltas and header.base_version != INITIAL_BASE:
        replica.push_begun(header.fragment, header.learner, header.session, header.step_count)
    return Push(replica, header, budget, client)


def _check_fields(replica: RunReplica, header: AcceptedItem) -> None:
    check_name(header.learner, "learner")
    check_id(header.session, "session id")
    check_id(header.delta, "delta id")
    replica.fragment(header.fragment)
    if header.base_version < INITIAL_BASE:
        raise bad_request(f"base_version must be -1 or more. base_version={header.base_version}")
    if header.base_version == INITIAL_BASE:
        spec = replica.log.spec
        if uid_of_draft(spec.name, header.session) != spec.uid:
            raise SyncerError("SESSION_UNKNOWN", "only the draft's creator may push its initial weights")
        return
    if len(header.base_digest) != 2 * DIGEST_SIZE:
        raise bad_request(f"base_digest must have {DIGEST_SIZE} bytes. actual={len(header.base_digest) // 2}")
    for name, count in (("step_count", header.step_count), ("token_count", header.token_count)):
        if not 1 <= count <= MAX_COUNT:
            raise bad_request(f"{name} must be 1 to 2^53. {name}={count}")
    if header.step_count > header.last_step:
        raise bad_request(
            f"step_count must be at most last_step. step_count={header.step_count}, last_step={header.last_step}"
        )


def _refused(replica: RunReplica, header: AcceptedItem, rejection: Rejection) -> SyncerError:
    """Returns the error for a push that the log does not admit; it names the delta that has the place of this one."""
    if rejection.reason != "BASE_REPEATED":
        return from_rejection(rejection)
    other = replica.state.bases[header.session, header.fragment, header.base_version]
    return from_rejection(rejection, delta_id=other)
