"""`skerry verify`: checks, from a run's log and objects alone, that every version is the result of its deltas.

Three things are checked. The *log*: each entry has its predecessor's digest; the fold gives each delta one fate. The
*chain*: weights from a snapshot and the updates after it have the digest of every version. The *replay*: rounds whose
deltas are retained are merged again: the deltas have the digests of their acceptance, the weights have that of the
version, and a snapshot's momentum and residual agree to the bit. Versions that are forgotten, and objects that were
collected, can't be checked; that is no problem, even if it happens while they are checked.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import numpy as np
from blake3 import blake3

from skerry.algorithm.step import TORN, OuterState
from skerry.cli.console import as_json, shown_progress
from skerry.runtime.options import EXISTING_FOLDER
from skerry.wire.digests import delta_digest
from skerry.wire.frames import parse_frames, raw_bytes
from skerry.wire.layout import FragmentLayout
from skerry_syncer.store.errors import CollectedError, LogCorruptError, ObjectMissingError, UnreadableObjectError
from skerry_syncer.store.log.entries import AcceptedItem
from skerry_syncer.store.log.fold import apply_entry
from skerry_syncer.store.log.run_log import RunLog
from skerry_syncer.store.log.state import FragmentState, RunState, VersionState
from skerry_syncer.store.maintenance.options import POSITION_OR_DURATION, opened_run, report, run_options
from skerry_syncer.store.versions.blobs import frame_batches
from skerry_syncer.store.versions.replay import DAMAGE, Replayer, outer_refs
from skerry_syncer.store.versions.run import Run
from skerry_syncer.store.versions.scratch import Scratch


@click.command(
    "verify",
    epilog="""\b
Examples:
  skerry verify demo --store file:///var/lib/skerry
  skerry verify demo --store s3://bucket/skerry --since 24h --json
""",
)
@run_options
@click.option(
    "--scratch",
    type=EXISTING_FOLDER,
    help="Folder for temporary files of six times the largest fragment.  [default: the system's]",
)
@click.option(
    "--since",
    type=POSITION_OR_DURATION,
    metavar="POSITION|DURATION",
    help="Check the versions that were the newest at or after a log position, or within a time before the log's end, "
    "as in 7d; begin with the snapshots before them.  [default: all versions]",
)
@as_json
def verify(
    *, store_url: str, run: str, uid: str | None, scratch: Path | None, since: float | None, is_json: bool
) -> None:
    """Replay a run from its log and objects, and check that every version is the result of its deltas.

    Exits with status 1 if a check fails. A damaged log is such a failure; its good entries are checked all the same.
    """

    async def check() -> VerifyReport:
        with TemporaryDirectory(dir=scratch, prefix="skerry-verify-") as folder:
            async with opened_run(store_url, run, uid) as opened:
                first = position_before(opened.state, since) if isinstance(since, float) else since or 0
                with shown_progress("verifying") as progress:
                    return await verify_run(opened, scratch=Scratch(Path(folder)), since=first, progress=progress)

    checked = asyncio.run(check())
    verdict = "ok" if checked.ok else f"{len(checked.problems)} problems"
    counts = f"{checked.versions_checked} versions checked, {checked.versions_replayed} of them replayed"
    report(
        {"ok": checked.ok, **asdict(checked)},
        [*(f"problem: {problem}" for problem in checked.problems), f"{verdict}: {counts}"],
        is_json=is_json,
    )
    sys.exit(0 if checked.ok else 1)


@dataclass(frozen=True)
class VerifyReport:
    """The result of a verification: at most one problem per version, the first."""

    versions_checked: int  # weights against the log's digest
    versions_replayed: int  # of these, merged again from their deltas
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether no problem was found."""
        return not self.problems


async def verify_run(
    run: Run,
    *,
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
    problems = await _check_log(run.log)
    fragments = sorted(run.state.fragments.items())
    firsts = {name: _first_to_check(run.state, fragment, since) for name, fragment in fragments}
    total = sum(number >= firsts[name] for name, fragment in fragments for number in fragment.versions)
    done = checked = replayed = 0
    for name, fragment in fragments:
        check = _FragmentCheck(run, fragment.layout, scratch)
        number = firsts[name]
        while number <= fragment.version:  # which grows where a collection runs: then the log is read on
            if number in fragment.versions:
                problem = await check.version(fragment.versions[number])
                if problem is not None:
                    problems.append(problem)
                done += 1
                if progress is not None:
                    progress(done, max(done, total))
            number += 1
        checked += check.checked_count
        replayed += check.replayed_count
    return VerifyReport(checked, replayed, tuple(problems))


def position_before(state: RunState, duration_s: float) -> int:
    """Returns the log position before the versions that were made within a time before the log's end."""
    made = [
        version.position
        for fragment in state.fragments.values()
        for version in fragment.versions.values()
        if state.age_s - version.made_at_age_s <= duration_s
    ]
    return min(made, default=state.position + 1) - 1


def versions_since(fragment: FragmentState, position: int) -> list[int]:
    """Returns the versions that were a fragment's newest at or after log position `position`."""
    return [number for number, version in fragment.versions.items() if not 0 < version.until <= position]


def _first_to_check(state: RunState, fragment: FragmentState, since: int) -> int:
    """Returns the version of a fragment's last whole snapshot that is not after position `since`."""
    first = min(versions_since(fragment, since), default=0)
    return min((version.version for version in state.chain(fragment, first)), default=first)


async def _check_log(log: RunLog) -> list[str]:
    """Folds the log again, from its first entry to the last good one, and returns what is wrong with the next."""
    names = [info.name.rpartition("/")[2] async for info in log.objects.list(f"{log.prefix}/log")]
    last = max((int(name) for name in names if name.isdecimal()), default=0)
    state = RunState(log.spec)
    try:
        async for entry, data in log.entries():
            apply_entry(state, entry, data)
        if state.position < last:
            raise LogCorruptError(f"log entry is missing. position={state.position + 1}, last={last}")
        await log.tail()
        if state.position == log.state.position and state.head_digest != log.state.head_digest:
            raise LogCorruptError("log changed since it was read")
    except (LogCorruptError, ObjectMissingError, ValueError) as error:
        return [f"log breaks off after entry {state.position}: {error}"]
    return []


def _hash_frames(hasher: blake3, data: bytes | memoryview) -> None:
    for frame in parse_frames(data):
        hasher.update(raw_bytes(frame))


class _FragmentCheck:
    """Checks one fragment's versions in order, along the chain and, where possible, by replay.

    Either way ends where something is wrong or was collected, and starts again at the next snapshot.
    """

    def __init__(self, run: Run, layout: FragmentLayout, scratch: Scratch) -> None:
        self._run = run
        self._layout = layout
        self._replayer = Replayer(run, layout.name)
        weights, momentum, residual, self._acc, self._vector, self._chain = scratch.zeros(6, layout.numel)
        self._state = OuterState(weights, momentum, residual, TORN)
        self._chain_version = TORN
        self.checked_count = 0
        self.replayed_count = 0

    async def version(self, version: VersionState) -> str | None:
        """Checks the next version and returns the first thing that is wrong with it."""
        is_checked, problem = False, None
        for step in (self._follow_chain, self._replay, self._check_snapshot):
            try:
                is_checked |= await step(version)
            except CollectedError:
                continue
            except DAMAGE as error:
                problem = problem or f"{self._layout.name} version {version.version}: {error}"
        self.checked_count += is_checked
        return problem

    async def _follow_chain(self, version: VersionState) -> bool:
        """Advances the chain's weights to this version by its update."""
        before, self._chain_version = self._chain_version, TORN
        update = () if version.commit is None else version.commit.commit.update
        if not update or before != version.version - 1 or self._run.state.are_condemned(update):
            return False
        await self._replayer.apply_update(update, self._chain)
        await self._replayer.check_digest(version, self._chain, "weights after the update differ")
        self._chain_version = version.version
        return True

    async def _replay(self, version: VersionState) -> bool:
        """Merges the round again, where the state before it is known and its deltas are retained."""
        run, record = self._run.state, version.commit
        before, self._state.version = self._state.version, TORN
        is_remembered = version.version >= run.fragments[self._layout.name].oldest
        if record is None or before != version.version - 1 or not is_remembered:
            return False
        if run.are_condemned(run.round_refs(version)):
            return False
        await self._replayer.replay(record, self._state, self._acc)
        self._state.version = TORN  # until all of it is found right
        for member in record.close.members:
            await self._check_delta(run.deltas[member.delta].item)
        self._state.version = version.version
        self.replayed_count += 1
        return True

    async def _check_snapshot(self, version: VersionState) -> bool:
        """Checks the version's own snapshot, and restarts chain and replay from it if they had ended."""
        if not version.weights or self._run.state.are_condemned(version.weights):
            return False
        await self._replayer.read_vector(version.weights, self._vector)
        await self._replayer.check_digest(version, self._vector, "snapshot differs")
        self._chain[:] = self._vector
        self._chain_version = version.version
        if not self._run.state.are_condemned(version.outer):
            await self._check_outer_state(version)
        return True

    async def _check_outer_state(self, version: VersionState) -> None:
        """Compares a snapshot's momentum and residual with the replay's, or starts a replay from them."""
        is_replayed = self._state.version == version.version
        self._state.version = TORN
        if not is_replayed:
            self._state.weights[:] = self._chain
        momentum, residual = outer_refs(version)
        for kind, refs, mine in (
            ("momentum", momentum, self._state.momentum),
            ("residual", residual, self._state.residual),
        ):
            await self._replayer.read_vector(refs, self._vector)
            if not is_replayed:
                mine[:] = self._vector
            elif not np.array_equal(mine.view(np.uint32), self._vector.view(np.uint32)):
                element = int(np.flatnonzero(mine.view(np.uint32) != self._vector.view(np.uint32))[0])
                raise UnreadableObjectError(f"snapshot's {kind}", f"it differs from the replay's at element {element}")
        self._state.version = version.version

    async def _check_delta(self, delta: AcceptedItem) -> None:
        """Compares a delta's parts, uncompressed, with the digests that it was accepted by."""
        for part in delta.parts:
            hasher = blake3()
            async for batch in frame_batches(self._run.blobs.part_frames(part), part.first, part.numel):
                await self._run.workers.run(_hash_frames, hasher, batch.data)
            if hasher.hexdigest() != part.digest:
                raise UnreadableObjectError(part.name, f"it has another digest. actual={hasher.hexdigest()}")
        whole = delta_digest([(part.first, part.numel, bytes.fromhex(part.digest)) for part in delta.parts]).hex()
        if whole != delta.digest:
            raise UnreadableObjectError(delta.delta, f"its parts are of another delta. expected={delta.digest}")
