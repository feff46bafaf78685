"""Finds every object of a run that is missing or damaged, says what that means, and mends what can be mended.

    snapshot, update    made again from an older snapshot, the updates and the deltas; the same bytes are put back
    part of a delta     another write of the same part is put back; else, while its round is not committed, the delta
                        is quarantined, and its round is closed again without it
    anything else       objects that will never be read again are condemned, as if a collection had taken it

Bytes are put back only if they have the digest that the log names. Decisions are items of the log, whose fold admits
them or not, so a syncer may serve the run meanwhile.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from skerry.algorithm.rounds import outage_length, round_length
from skerry.runtime.identifiers import Entropy
from skerry.runtime.workers import Workers
from skerry.wire.errors import FrameError
from skerry_syncer.store.errors import ObjectMissingError, UnreadableObjectError
from skerry_syncer.store.log.entries import ClosedItem, CollectedItem, Decided, Fate, FateItem, Item, ObjectRef
from skerry_syncer.store.log.run_log import RunLog
from skerry_syncer.store.log.state import FragmentState, RunState, VersionState
from skerry_syncer.store.maintenance.damage import Damage, Remedy, put_back
from skerry_syncer.store.maintenance.inspection import object_digest
from skerry_syncer.store.versions.blobs import SnapshotKind
from skerry_syncer.store.versions.remake import Pieces, Remaker
from skerry_syncer.store.versions.replay import DAMAGE, outer_refs
from skerry_syncer.store.versions.scratch import Scratch

_CHECKED_AT_ONCE: Final = 16
_LOST_PARTS: Final = "its stored parts can't be read"


class _Named(NamedTuple):
    """An object that the log names."""

    ref: ObjectRef
    fragment: str
    kind: SnapshotKind | None = None  # of a snapshot
    version: int = -1  # of a snapshot or update
    delta: str = ""  # of a part


class _Lost(NamedTuple):
    """A named object that is missing or damaged."""

    named: _Named
    problem: str


class Repair:
    """Looks at the objects of one run and mends them; a dry run unless `acts`."""

    def __init__(
        self,
        log: RunLog,
        *,
        workers: Workers,
        scratch: Scratch,
        entropy: Entropy,
        may_append: bool,
        acts: bool = False,
        gives_up: bool = False,
    ) -> None:
        """Without `may_append` the log itself is damaged, and only objects are put back.

        `gives_up` also condemns what can't be mended and is not needed for the newest versions.
        """
        self._log = log
        self._workers = workers
        self._scratch = scratch
        self._entropy = entropy
        self._may_append = may_append
        self._acts = acts
        self._gives_up = gives_up
        self._lost: set[str] = set()

    async def run(self, progress: Callable[[int, int], None] | None = None) -> list[Damage]:
        """Checks every object that the log names and no collection took; calls `progress` with (checked, in all).

        Raises:
            StoreError: the store can't be used; repeating is safe.
        """
        lost = await self._find(list(_named_objects(self._log.state)), progress)
        if self._may_append:
            await self._log.tail()  # a collection says in the log what it takes before it deletes it
        lost = [one for one in lost if one.named.ref.name not in self._log.state.condemned]
        self._lost = {one.named.ref.name for one in lost}
        found: list[Damage] = []
        left: list[_Lost] = []
        for one in lost:
            pieces = await self._same_bytes(one.named)
            if pieces is None:
                left.append(one)
                continue
            found.append(await self._restore(one, pieces))
        return found + await self._decide(left)

    async def _find(self, named: Sequence[_Named], progress: Callable[[int, int], None] | None) -> list[_Lost]:
        lost: list[_Lost] = []
        for start in range(0, len(named), _CHECKED_AT_ONCE):
            some = named[start : start + _CHECKED_AT_ONCE]
            problems = await asyncio.gather(*(self._problem(one.ref) for one in some))
            lost += [_Lost(one, problem) for one, problem in zip(some, problems, strict=True) if problem]
            if progress is not None:
                progress(start + len(some), len(named))
        return lost

    async def _problem(self, ref: ObjectRef) -> str:
        try:
            digest = await object_digest(self._log, ref, self._workers)
        except ObjectMissingError:
            return "is missing"
        except (FrameError, UnreadableObjectError) as error:
            return f"can't be read ({error})"
        return "" if digest == ref.digest else "has another content"

    async def _same_bytes(self, named: _Named) -> Pieces | None:
        """Returns the lost object's bytes, checked by its digest, or None if they can't be recovered."""
        self._log.blobs.unreadable.update(self._lost)
        remaker = Remaker(self._log, named.fragment, self._workers, self._scratch)
        try:
            if named.delta:
                return await self._other_write(named.ref)
            at = self._log.state.fragments[named.fragment].versions[named.version]
            if named.kind is None:
                pieces = await remaker.update(at, named.ref)
            else:
                pieces = await remaker.snapshot(at, named.ref, named.kind)
        except DAMAGE:
            return None
        hasher = hashlib.sha256()
        async for piece in pieces():
            await self._workers.run(hasher.update, piece)
        return pieces if hasher.hexdigest() == named.ref.digest else None

    async def _other_write(self, ref: ObjectRef) -> Pieces | None:
        """Returns another write of the same part: a push that was cut off and resumed leaves some."""
        log, prefix = self._log, f"{self._log.prefix}/"
        async for info in log.objects.list(prefix + ref.name.rpartition("/")[0]):
            name = info.name.removeprefix(prefix)
            if name == ref.name or name.rpartition("-")[0] != ref.name.rpartition("-")[0]:
                continue
            other = ObjectRef(name, ref.first, ref.numel, info.size_bytes, ref.digest)
            if not await self._problem(other):
                return lambda: log.blobs.read(other)
        return None

    async def _restore(self, one: _Lost, pieces: Pieces) -> Damage:
        name = one.named.ref.name
        detail = "another write of the same part" if one.named.delta else "made again from what it was made of"
        if self._acts:
            await put_back(self._log, name, pieces(), self._entropy)
            self._lost.discard(name)
            self._log.blobs.unreadable.discard(name)
        return Damage(name, one.problem, Remedy.RESTORE, detail, is_mended=self._acts)

    async def _decide(self, lost: Sequence[_Lost]) -> list[Damage]:
        """Decides what becomes of objects that can't be recovered, and appends the decisions to the log."""
        state = self._log.state
        open_deltas = {one.named.delta for one in lost} & _open_deltas(state)
        needed = state.referenced_names()
        found = [self._judge(one, open_deltas, needed) for one in lost]
        names = tuple(one.name for one in found if one.remedy in (Remedy.QUARANTINE, Remedy.FORGET))
        if not self._acts or not names:
            return found
        items = [*_without(state, open_deltas), CollectedItem(names)]
        outcomes = await self._log.append(items)
        is_done = all(outcome.rejection is None for outcome in outcomes)
        return [replace(one, is_mended=is_done and one.name in names) for one in found]

    def _judge(self, one: _Lost, open_deltas: set[str], needed: set[str]) -> Damage:
        named, name, state = one.named, one.named.ref.name, self._log.state
        if not self._may_append:
            return Damage(name, one.problem, Remedy.NONE, "the log has to be mended first")
        if named.delta in open_deltas:
            detail = f"delta {named.delta} is quarantined, and its round goes on without it"
            return Damage(name, one.problem, Remedy.QUARANTINE, detail)
        is_needed = name in needed
        is_read = not named.delta or state.deltas[named.delta].fate is Fate.MERGED
        if not is_needed and (not is_read or self._gives_up):
            return Damage(name, one.problem, Remedy.FORGET, "nobody will read it again")
        return Damage(name, one.problem, Remedy.NONE, _advice(named, is_needed=is_needed))


def _named_objects(state: RunState) -> Iterator[_Named]:
    """Yields what the log names and no collection took, each before what is made again from it."""
    everything = [*_version_objects(state), *_parts(state)]
    yield from (one for one in everything if one.ref.name not in state.condemned)


def _version_objects(state: RunState) -> Iterator[_Named]:
    for name, fragment in sorted(state.fragments.items()):
        for version, at in sorted(fragment.versions.items()):
            yield from (_Named(ref, name, kind, version) for kind, refs in _snapshot_refs(at) for ref in refs)
            if at.commit is not None:
                yield from (_Named(ref, name, None, version) for ref in at.commit.commit.update)


def _snapshot_refs(at: VersionState) -> Iterator[tuple[SnapshotKind, Sequence[ObjectRef]]]:
    momentum, residual = outer_refs(at)
    yield from (("weights", at.weights), ("momentum", momentum), ("residual", residual))


def _parts(state: RunState) -> Iterator[_Named]:
    for delta in state.deltas.values():
        yield from (_Named(ref, delta.item.fragment, delta=delta.item.delta) for ref in delta.item.parts)


def _open_deltas(state: RunState) -> set[str]:
    """Returns the deltas whose round is not committed."""
    found: set[str] = set()
    for fragment in state.fragments.values():
        found.update(fragment.pending)
        if fragment.closing is not None:
            found.update(member.delta for member in fragment.closing.members)
    return found


def _without(state: RunState, lost: set[str]) -> Iterator[Item]:
    """Yields the items by which the log goes on without these deltas."""
    decided = {name: Decided(name, Fate.QUARANTINED, _LOST_PARTS) for name in sorted(lost)}
    for fragment in state.fragments.values():
        pending = tuple(one for name, one in decided.items() if name in fragment.pending)
        if pending:
            yield FateItem(pending)
        if fragment.closing is not None and any(member.delta in lost for member in fragment.closing.members):
            frozen = tuple(decided[member.delta] for member in fragment.closing.members if member.delta in lost)
            yield _closed_again(state, fragment, fragment.closing, frozen)


def _closed_again(
    state: RunState, fragment: FragmentState, closing: ClosedItem, decided: tuple[Decided, ...]
) -> ClosedItem:
    """Returns the close of the same round without the decided deltas; without any member it voids the round.

    The learners that work are the same, so the participation falls with the weight that is left.
    """
    lost = {one.delta for one in decided}
    members = tuple(member for member in closing.members if member.delta not in lost)
    deltas = [state.deltas[member.delta].item for member in members]
    weights, step_counts = [member.weight for member in members], [delta.step_count for delta in deltas]
    total = sum(member.weight for member in closing.members)
    participation = closing.participation * (sum(weights) / total if sum(weights) > 0 else 1.0)
    full = (fragment.closing_policy or state.policy).inner_step_count
    missed = fragment.missed_step_count((delta.learner for delta in deltas), closing.version - 1)
    after_outage = outage_length(
        step_counts, participation=participation, missed_step_count=missed, inner_step_count=full
    )
    length = after_outage or round_length(step_counts, weights, inner_step_count=full)
    return ClosedItem(closing.fragment, closing.version, closing.attempt + 1, members, participation, decided, length)


def _advice(named: _Named, *, is_needed: bool) -> str:
    """Returns what the loss of an object means, and what a person can do."""
    if not is_needed:
        what = "weights of old versions can't be exported" if not named.delta else "its version can't be replayed"
        return f"without it {what}; restore it from a backup, or let it go by --give-up"
    if named.delta or named.kind in ("momentum", "residual"):
        return (
            f"restore it from a backup; else a syncer that needs it gives fragment {named.fragment} its next version "
            "with the same weights and without momentum, and then it can be let go by --give-up"
        )
    return "restore it from a backup, or roll the run back to a position that `skerry export` can still write"
