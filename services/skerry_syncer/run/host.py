"""The runs of one process: opens a replica of each run at its first call, and closes it when it is idle.

Runs share the process's threads, scratch and byte budget, and nothing else. A run that fails is opened again at the
next call; the others are not affected.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from skerry.runtime.logs import get_logger
from skerry.wire import kernels
from skerry.wire.layout import check_id, check_name
from skerry_syncer.access.limits import IN_FLIGHT_BYTES
from skerry_syncer.errors import RETRY_STORE_S, DrainingError, SyncerError
from skerry_syncer.run.events import running
from skerry_syncer.run.metrics import SyncerMetrics
from skerry_syncer.run.parts import ByteBudget
from skerry_syncer.run.replica import RunReplica
from skerry_syncer.run.upkeep import tidy
from skerry_syncer.settings import ReplicaSettings
from skerry_syncer.store.errors import RunExistsError, RunNotFoundError, StoreError
from skerry_syncer.store.log.entries import RunStatus
from skerry_syncer.store.store import Store
from skerry_syncer.store.versions.run import Run
from skerry_syncer.store.versions.scratch import Scratch

_LOG: Final = get_logger(__name__)
# Time from the start to the first tidying, short enough for a syncer that is restarted every day.
_FIRST_TIDY_S: Final = 600.0


@dataclass(frozen=True)
class HostSettings:
    """How one process spends its time and memory on all its runs."""

    in_flight_bytes: int = IN_FLIGHT_BYTES
    name_lifetime_s: float = 1.0  # for which the uid of a name is cached
    sweep_s: float = 60.0  # between checks for runs that were deleted, replaced or are idle
    tidy_s: float = 86_400.0  # between two times that abandoned drafts and orphaned parts are deleted
    idle_s: float = 60.0  # after which a run without use is closed
    opening_s: float = 5.0  # for which a call waits for its run's log to be read
    replica: ReplicaSettings = field(default_factory=ReplicaSettings)


class _Run:
    """A run's replica, once its log is read, and the task that reads the log and runs the replica."""

    def __init__(self, now_s: float) -> None:
        self.opening: asyncio.Future[RunReplica] = asyncio.get_running_loop().create_future()
        self.replica: RunReplica | None = None  # while the log is read
        self.task: asyncio.Task[None] | None = None
        self.used_at_s = now_s


class RunHost:
    """Every run that this process serves. Call the other methods inside `serving` only."""

    def __init__(
        self, store: Store, *, scratch: Scratch, settings: HostSettings, metrics: SyncerMetrics | None = None
    ) -> None:
        """Takes the resources that the replicas share."""
        self.store = store
        self.clock = store.clock
        self.workers = store.workers
        self.settings = settings
        self.budget = ByteBudget(settings.in_flight_bytes)
        self._metrics = metrics or SyncerMetrics(store.clock)
        self._metrics.budget = self.budget
        self._scratch = scratch
        self._runs: dict[tuple[str, str], _Run] = {}  # by name and uid
        self._names: dict[str, tuple[str, float]] = {}  # by name: uid, and when it was read
        self._tasks: set[asyncio.Task[None]] = set()  # of the runs
        self._is_draining = False

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Runs replicas while the context lasts, and cancels them at its end."""
        try:
            async with running(self._sweep()), running(self._resume()), running(self._tidy()):
                yield
        finally:
            self._is_draining = True
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def open(
        self, name: str, uid: str = "", *, seen_position: int = 0, is_creator: bool = False, wakes: bool = True
    ) -> RunReplica:
        """Returns the replica of the run named `name`, folded at least to `seen_position`.

        A draft, which has no name yet, is found by its uid. `is_creator` also finds a run that is committed and not
        named yet, which only its creator may use. One that is only looked at need not wake, and reads its log rarely.

        Raises:
            BadNameError: the name or uid is not legal.
            SyncerError: RUN_NOT_FOUND; RUN_REPLACED: the name has another uid; RUN_OPENING; DRAINING; EJECTED.
            RunExistsError: another draft got the name.
            StoreError: the store failed, or holds less than the caller has seen.
        """
        check_name(name, "run")
        if uid:
            check_id(uid, "run uid")
        named = await self._uid_of(name)
        if not uid and named is None:
            raise lost_name(name, uid, named)
        replica = await self._replica(name, uid or named or "", named)
        if wakes:
            replica.wake()
        if uid and uid != named and (is_creator or replica.state.status is RunStatus.DRAFT):
            if named is not None:
                raise RunExistsError(f"another run got the name first. run={name}", uid=named)
        elif uid and uid != named:
            raise lost_name(name, uid, named)
        if seen_position > replica.state.position:
            await replica.log.wait_for(seen_position)
        if not uid:
            await replica.is_draft()  # it got its name after its commit, which this process may not have read yet
        await replica.check_caller()
        return replica

    def forget_name(self, name: str) -> None:
        """Drops the cached uid of a name that was just published or removed."""
        self._names.pop(name, None)

    async def drain(self, grace_s: float) -> None:
        """Refuses new work and drains every replica; returns when all merges have ended, or after `grace_s`."""
        self._is_draining = True
        try:
            async with asyncio.timeout(grace_s), asyncio.TaskGroup() as tasks:
                for run in self._runs.values():
                    if run.replica is not None:
                        tasks.create_task(run.replica.drain())
        except TimeoutError:
            _LOG.warning("merges did not end in time; another replica will take over", grace_s=grace_s)

    async def _uid_of(self, name: str) -> str | None:
        known = self._names.get(name)
        now_s = self.clock.monotonic_s()
        if known is not None and now_s - known[1] < self.settings.name_lifetime_s:
            return known[0]
        uid = await self.store.resolve(name)
        if uid is None:
            self._names.pop(name, None)
        else:
            self._names[name] = (uid, now_s)
        return uid

    async def _replica(self, name: str, uid: str, named: str | None, *, is_patient: bool = False) -> RunReplica:
        """Returns the replica of a run; `named` is the uid that the name means.

        Opening continues when callers give up waiting for it.
        """
        if self._is_draining:
            raise DrainingError
        now_s = self.clock.monotonic_s()
        run = self._runs.get((name, uid))
        if run is None:
            run = self._runs[name, uid] = _Run(now_s)
            run.task = asyncio.create_task(self._serve(run, name, uid), name=f"run {name}")
            self._tasks.add(run.task)
            run.task.add_done_callback(self._tasks.discard)
        run.used_at_s = now_s
        if not run.opening.done():
            await asyncio.wait([run.opening], timeout=None if is_patient else self.settings.opening_s)
        if not run.opening.done():
            read = self.store.read_position(name, uid)
            _LOG.info("run is being opened", run=name, uid=uid, position=read)
            raise SyncerError(
                "RUN_OPENING", f"the run's log is being read. run={name}, position={read}", retry_after_s=RETRY_STORE_S
            )
        if run.opening.cancelled():
            raise DrainingError
        try:
            return run.opening.result()
        except RunNotFoundError:
            raise lost_name(name, uid, named) from None

    async def _serve(self, run: _Run, name: str, uid: str) -> None:
        """Opens the run and serves it. A failure ends this run only, and the next call opens it again."""
        try:
            stored = await self.store.open_run(name, uid)
            if self._is_draining:
                raise DrainingError
            run.replica = replica = RunReplica(stored, scratch=self._scratch, settings=self.settings.replica)
            self._metrics.opened(replica)
            state = replica.state
            _LOG.info("run opened", run=name, uid=uid, position=state.position, status=state.status.value)
            run.opening.set_result(replica)
            largest_numel = max((layout.numel for layout in stored.spec.fragments), default=0)
            async with running(self.workers.run(kernels.warm_up, largest_numel)):
                await replica.run()
        except asyncio.CancelledError:
            run.opening.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - the outermost edge of one run
            if run.replica is None:
                run.opening.set_exception(error)
                run.opening.exception()  # raised in every call that still waits for it, if any
                if not isinstance(error, RunNotFoundError | DrainingError):
                    _LOG.warning("run could not be opened", run=name, uid=uid, cause=str(error))
            else:
                _LOG.error("run failed; the next call opens it again", run=name, uid=uid, exc_info=error)
        finally:
            if run.replica is not None:
                self._metrics.closed(run.replica)
            if self._runs.get((name, uid)) is run:
                del self._runs[name, uid]

    async def _opened(self, name: str, uid: str) -> Run:
        """Returns a named run, however long opening it takes; it need not wake."""
        return (await self._replica(name, uid, uid, is_patient=True)).stored

    async def _resume(self) -> None:
        """Opens every named run once, so that work that a killed replica left is finished without a call."""
        try:
            runs = await self.store.list_runs()
        except StoreError as error:
            _LOG.warning("runs could not be listed; each is opened at its first call", cause=str(error))
            return
        for name, uid in runs:
            try:
                await self._opened(name, uid)
            except Exception:  # noqa: BLE001, S112 - of whatever kind, opening it has said why, and others go on
                continue

    async def _tidy(self) -> None:
        """Deletes objects that no log entry will name, of all runs, from time to time."""
        pause_s = min(_FIRST_TIDY_S, self.settings.tidy_s)
        while True:
            await self.clock.sleep(pause_s)
            pause_s = self.settings.tidy_s
            try:
                await tidy(self.store, self._opened)
            except StoreError as error:
                _LOG.warning("abandoned drafts could not be looked for", cause=str(error))

    async def _sweep(self) -> None:
        """Closes idle runs and those that lost their name, and ends the streams of the latter."""
        while True:
            await self.clock.sleep(self.settings.sweep_s)
            for run in list(self._runs.values()):
                if run.replica is None:
                    continue
                if not run.replica.is_idle:
                    await self._check_name(run, run.replica)
                elif self.clock.monotonic_s() - run.used_at_s > self.settings.idle_s:
                    self._close(run, run.replica)

    async def _check_name(self, run: _Run, replica: RunReplica) -> None:
        spec = replica.log.spec
        if replica.state.status is RunStatus.DRAFT:
            return
        try:
            named = await self._uid_of(spec.name)
        except StoreError:  # the replica's tailing loop logs it
            return
        if named != spec.uid:
            replica.followers.end(lost_name(spec.name, spec.uid, named))
            if self.clock.monotonic_s() - run.used_at_s > self.settings.idle_s:  # whatever its rounds still wait for
                self._close(run, replica)

    def _close(self, run: _Run, replica: RunReplica) -> None:
        """Ends the replica and lets go of its log; the next call opens both again."""
        assert run.task is not None  # it made the replica
        run.task.cancel()
        self._runs.pop((replica.log.spec.name, replica.log.spec.uid), None)
        self.store.release(replica.stored)


def lost_name(name: str, uid: str, named: str | None) -> SyncerError:
    """Returns the error for a run that does not have the name, which another one or none has."""
    if named in (None, uid):
        return SyncerError("RUN_NOT_FOUND", f"no such run. run={name}")
    return SyncerError(
        "RUN_REPLACED", f"the name belongs to another run now. run={name}, uid={uid}", metadata={"run_uid": named}
    )
