"""Checks, from a run's log and objects alone, that every version is the result of its deltas.

Three things are checked. The *log*: each entry has its predecessor's digest, and each delta has one fate. The *chain*:
weights from a snapshot and the updates after it have the digest of every version. The *replay*: rounds whose deltas are
retained are merged again, and weights, update and residual must agree to the bit. Objects that were collected can't be
checked; that is not a problem, and it is none if a collection takes them while they are checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from skerry.algorithm.step import TORN, Float32s, OuterState
from skerry.runtime.workers import Workers
from skerry.wire.digests import delta_digest
from skerry.wire.errors import FrameError
from skerry.wire.layout import FragmentLayout
from skerry_syncer.store.errors import CollectedError, LogCorruptError, ObjectMissingError, UnreadableObjectError
from skerry_syncer.store.log.entries import AcceptedItem, Fate, ObjectRef, RunStatus
from skerry_syncer.store.log.fold import apply_entry
from skerry_syncer.store.log.run_log import RunLog
from skerry_syncer.store.log.state import CommitRecord, RunState, VersionState
from skerry_syncer.store.maintenance.collect import versions_since
from skerry_syncer.store.maintenance.inspection import object_digest, what_is_wrong_after
from skerry_syncer.store.versions.replay import DAMAGE, Replayer, UnreadableDeltaError, outer_refs, weights_digest
from skerry_syncer.store.versions.run import Run
from skerry_syncer.store.versions.scratch import Scratch


@dataclass(frozen=True)
class Problem:
    """Something that differs from what the log says."""

    fragment: str | None  # None: the log itself
    version: int | None
    what: str
    expected: str = ""
    actual: str = ""

    def __str__(self) -> str:
        """Returns it in one line."""
        facts = {"fragment": self.fragment, "version": self.version, "expected": self.expected, "actual": self.actual}
        given = ", ".join(f"{name}={value}" for name, value in facts.items() if value not in (None, ""))
        return f"{self.what}. {given}" if given else self.what


@dataclass(frozen=True)
class VerifyReport:
    """The result of a verification: at most one problem per version, the first."""

    versions_checked: int  # weights against the log's digest
    versions_replayed: int  # of these, merged again from their deltas
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Whether no problem was found."""
        return not self.problems


async def verify_run(
    run: Run,
    *,
    workers: Workers,
    scratch: Scratch,
    since: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Checks everything that the run's log names and that was not collected.

    The whole log is checked. Of the versions, only those are that were the newest at or after position `since`, and
    those before them down to a snapshot, from which the check begins. Of a damaged log, the good entries count.

    Needs scratch for six times the largest fragment. Calls `progress` with (versions done, in all).

    Raises:
        StoreUnavailableError: the store can't be read; nothing is known then.
    """
    log = run.log
    problems = await _check_log(log)
    spans = {name: _versions_to_check(log.state, name, since) for name in sorted(log.state.fragments)}
    total = sum(map(len, spans.values()))
    done = checked = replayed = 0
    for name, versions in spans.items():
        check = _FragmentCheck(run, log.spec.fragment(name), workers, scratch)
        fragment, version = log.state.fragments[name], versions.start - 1
        while version < fragment.version:  # which grows where a collection runs: then the log is read on
            version += 1
            problem = await check.version(version)
            if problem is not None:
                problems.append(problem)
            done += 1
            if progress is not None:
                progress(done, max(done, total))
        checked += check.checked_count
        replayed += check.replayed_count
    return VerifyReport(checked, replayed, tuple(problems))


def _versions_to_check(state: RunState, name: str, since: int) -> range:
    """Returns a fragment's versions from the last whole snapshot that is not after position `since`."""
    fragment = state.fragments[name]
    first = min(versions_since(fragment, since), default=0)
    for at in state.chain(fragment, first, 0):
        first = at.version
    return range(first, fragment.version + 1)


async def _check_log(log: RunLog) -> list[Problem]:
    """Folds the log again, counts the fates that each delta gets, and looks for what is after its end."""
    failure = await what_is_wrong_after(log)
    problems = await _check_entries(log)
    if failure is not None:
        problems.append(Problem(None, None, f"log breaks off after entry {log.state.position}: {failure}"))
    return problems


async def _check_entries(log: RunLog) -> list[Problem]:
    state = RunState(log.spec)
    fates: Counter[str] = Counter()
    try:
        async for entry, data in log.entries(stop=log.state.position + 1):
            for outcome in apply_entry(state, entry, data):
                fates.update(delta.item.delta for delta in outcome.decided)
    except (LogCorruptError, ObjectMissingError, ValueError) as error:
        return [Problem(None, None, f"log breaks off after entry {state.position}: {error}")]
    if state.head_digest != log.state.head_digest:
        return [Problem(None, None, "log changed since it was read", log.state.head_digest, state.head_digest)]
    return list(_check_fates(state, fates))


def _check_fates(state: RunState, fates: Counter[str]) -> Iterator[Problem]:
    """Yields deltas that do not have exactly one fate. While the run is not closed, a delta may be pending."""
    members = Counter(
        (member.delta, version.version)
        for fragment in state.fragments.values()
        for version in fragment.versions.values()
        if version.commit is not None
        for member in version.commit.close.members
    )
    for name, delta in state.deltas.items():
        where = delta.item.fragment
        expected = 0 if delta.fate is Fate.PENDING else 1
        if fates[name] != expected:
            yield Problem(where, None, f"delta {name} does not have one fate", str(expected), str(fates[name]))
        elif delta.fate is Fate.PENDING and state.status is RunStatus.CLOSED:
            yield Problem(where, None, f"delta {name} has no fate though the run is closed")
        elif delta.fate is Fate.MERGED and delta.item.base_version >= 0 and members[name, delta.version] != 1:
            yield Problem(where, delta.version, f"merged delta {name} is not in its version's set once")
    if sum(members.values()) != len({name for name, _ in members}):
        yield Problem(None, None, "a delta went into several versions")


class _Mismatch(Exception):  # noqa: N818 - it never leaves this module; what leaves it is a Problem
    """Something differs from the log."""

    def __init__(self, what: str, expected: str, actual: str) -> None:
        super().__init__(what)
        self.what, self.expected, self.actual = what, expected, actual


class _FragmentCheck:
    """Checks one fragment's versions in order, along the chain and, where possible, by replay.

    Either way ends where something is wrong or was collected, and starts again at the next snapshot.
    """

    def __init__(self, run: Run, layout: FragmentLayout, workers: Workers, scratch: Scratch) -> None:
        self._run = run
        self._layout = layout
        self._workers = workers
        self._replayer = Replayer(run, layout.name, workers)
        weights, momentum, residual, self._acc, self._vector, self._chain = scratch.zeros(6, layout.numel)
        self._state = OuterState(weights, momentum, residual, TORN)
        self._chain_version = TORN
        self.checked_count = 0
        self.replayed_count = 0

    async def version(self, number: int) -> Problem | None:
        """Checks the next version and returns the first thing that is wrong with it."""
        versions = self._run.state.fragments[self._layout.name].versions
        if number not in versions:
            return Problem(self._layout.name, number, "version is missing")
        at = versions[number]
        is_checked, problem = False, None
        for step in (self._follow_chain, self._replay, self._check_snapshot):
            try:
                is_checked |= await step(at)
            except CollectedError:
                continue
            except _Mismatch as error:
                problem = problem or Problem(self._layout.name, number, error.what, error.expected, error.actual)
            except DAMAGE as error:
                problem = problem or Problem(self._layout.name, number, str(error))
        self.checked_count += is_checked
        return problem

    async def _follow_chain(self, at: VersionState) -> bool:
        """Advances the chain's weights to this version by its update."""
        version, self._chain_version = self._chain_version, TORN
        if at.commit is None or version != at.version - 1 or not self._replayer.has_all(at.commit.commit.update):
            return False
        await self._check_objects(at.commit.commit.update)
        await self._replayer.apply_update(at.commit.commit.update, self._chain)
        await self._expect_digest("weights after the update differ", at, self._chain)
        self._chain_version = at.version
        return True

    async def _replay(self, at: VersionState) -> bool:
        """Merges the round again, where the state before it is known and its deltas are retained."""
        if at.commit is None or self._state.version != at.version - 1:
            self._state.version = TORN
            return False
        deltas = [self._run.state.deltas[member.delta].item for member in at.commit.close.members]
        update = at.commit.commit.update
        if not self._replayer.has_all([*update, *(part for delta in deltas for part in delta.parts)]):
            self._state.version = TORN
            return False
        try:
            for delta in deltas:
                await self._check_delta(delta)
            await self._replay_commit(at, at.commit)
        except BaseException:
            self._state.version = TORN
            raise
        self.replayed_count += 1
        return True

    async def _replay_commit(self, at: VersionState, record: CommitRecord) -> None:
        published = self._vector
        await self._replayer.read_update(record.commit.update, published)
        replayed = await self._replayer.replay(record, self._state, self._acc, published=published)
        if replayed.digest != at.digest:
            raise _Mismatch("replay made other weights", at.digest, replayed.digest)
        at_element = replayed.first_difference
        if at_element is not None:
            stored = f"{published[at_element]!r} in the stored update"
            raise _Mismatch(f"replay made another update from element {at_element}", stored, "another value")

    async def _check_snapshot(self, at: VersionState) -> bool:
        """Checks the version's own snapshot, and restarts chain and replay from it if they had ended."""
        if not at.weights or not self._replayer.has_all(at.weights):
            if at.commit is None:
                self._state.version = TORN
            return False
        await self._check_objects(at.weights)
        await self._replayer.read_vector(at.weights, self._vector)
        await self._expect_digest("snapshot's weights differ", at, self._vector)
        self._chain[:] = self._vector
        self._chain_version = at.version
        if self._replayer.has_all(at.outer):
            await self._check_outer_state(at)
        return True

    async def _check_outer_state(self, at: VersionState) -> None:
        """Compares a snapshot's momentum and residual with the replay's, or starts a replay from them."""
        await self._check_objects(at.outer)
        is_replayed = self._state.version == at.version
        self._state.version = TORN
        if not is_replayed:
            self._state.weights[:] = self._chain
        momentum, residual = outer_refs(at)
        for what, refs, mine in (
            ("momentum", momentum, self._state.momentum),
            ("residual", residual, self._state.residual),
        ):
            await self._replayer.read_vector(refs, self._vector)
            if not is_replayed:
                mine[:] = self._vector
            elif not np.array_equal(mine.view(np.uint32), self._vector.view(np.uint32)):
                element = int(np.flatnonzero(mine.view(np.uint32) != self._vector.view(np.uint32))[0])
                raise _Mismatch(
                    f"snapshot's {what} differs from the replay's at element {element}",
                    repr(float(mine[element])),
                    repr(float(self._vector[element])),
                )
        self._state.version = at.version

    async def _expect_digest(self, what: str, at: VersionState, weights: Float32s) -> None:
        actual = await weights_digest(weights, workers=self._workers)
        if actual != at.digest:
            raise _Mismatch(what, at.digest, actual)

    async def _check_objects(self, refs: Sequence[ObjectRef]) -> None:
        """Compares whole objects' bytes with the digests that the log names."""
        for ref in refs:
            actual = await object_digest(self._run, ref, self._workers)
            if actual != ref.digest:
                raise _Mismatch(f"object {ref.name} differs", ref.digest, actual)

    async def _check_delta(self, delta: AcceptedItem) -> None:
        """Compares a delta's parts, uncompressed, with the digests that it was accepted by."""
        for part in delta.parts:
            try:
                actual = await object_digest(self._run, part, self._workers)
            except CollectedError:
                raise
            except (FrameError, ObjectMissingError, UnreadableObjectError) as error:
                raise UnreadableDeltaError(delta.delta, error) from error
            if actual != part.digest:
                raise _Mismatch(f"a part of delta {delta.delta} differs", part.digest, actual)
        whole = delta_digest([(part.first, part.numel, bytes.fromhex(part.digest)) for part in delta.parts]).hex()
        if whole != delta.digest:
            raise _Mismatch(f"delta {delta.delta} differs", delta.digest, whole)
