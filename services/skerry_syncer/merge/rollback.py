"""Rolls a run back: stores every fragment's older content anew, and then makes it the newest in one log entry.

Storing a large run takes minutes, so it goes on in a task of the replica while calls come and go. What is stored is
noted in the store by the request's id: if the replica dies, the same request goes on from there on any other one. Only
the log entry changes the run, and only a call appends it, so a roll-back whose caller has given up has no effect.

    rollbacks/<request id>/<fragment>      the fragment as the log entry will name it, as JSON: advice, never truth
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import structs

from skerry.runtime.logs import get_logger
from skerry.runtime.workers import Workers
from skerry.wire.layout import check_id
from skerry_syncer.access.caller import author
from skerry_syncer.errors import DrainingError, SyncerError, from_rejection
from skerry_syncer.store.errors import ObjectExistsError, ObjectMissingError, StoreError
from skerry_syncer.store.log.entries import RollbackFragment, RollbackItem, RunStatus
from skerry_syncer.store.log.state import FragmentState, VersionState
from skerry_syncer.store.objects.interface import read_json
from skerry_syncer.store.versions.replay import Replayer, snapshot_tensors
from skerry_syncer.store.versions.run import Run

_LOG: Final = get_logger(__name__)
# A roll-back that loses the race against a commit is appended again. Commits are seconds apart.
_ATTEMPTS: Final = 8
# Time after which a call that asked for progress is answered: far below the deadline of any caller.
_ANSWER_S: Final = 2.0


class Progress(NamedTuple):
    """How many of a run's fragments are stored for a roll-back."""

    stored_count: int
    fragment_count: int


@dataclass
class _Job:
    """The storing of what one request rolls back to."""

    request_id: str
    sources: tuple[tuple[FragmentState, VersionState], ...]
    stored: list[RollbackFragment] = field(default_factory=list)
    failure: Exception | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class RollBacks:
    """The roll-backs of one run on one replica."""

    def __init__(
        self,
        run: Run,
        workers: Workers,
        start: Callable[[Coroutine[Any, Any, object]], object],
        *,
        is_draining: Callable[[], bool],
    ) -> None:
        """Stores in tasks that `start` starts; they end with the replica, and when it drains after a fragment."""
        self._run = run
        self._workers = workers
        self._start = start
        self._is_draining = is_draining
        self._jobs: dict[int, _Job] = {}  # by target position

    async def roll_back(self, request_id: str, target_position: int, *, with_progress: bool) -> Progress | None:
        """Gives every fragment its next version, with the content that it had at `target_position`.

        Returns None when that is done. With `with_progress` it returns after some seconds how far it is; the same call
        again goes on.

        Raises:
            SyncerError: VERSION_NOT_FOUND: no such position, or the content was collected; RUN_CLOSED, RUN_DRAFT;
                DRAINING.
        """
        check_id(request_id, "request id")
        if request_id in self._run.state.requests:
            return None
        await self._run.log.tail()
        while request_id not in self._run.state.requests:
            job = self._job(request_id, target_position)
            with suppress(TimeoutError):
                async with asyncio.timeout(_ANSWER_S if with_progress else None):
                    await job.ended.wait()
            if not job.ended.is_set():
                return Progress(len(job.stored), len(job.sources))
            if self._jobs.get(target_position) is job:  # else another request used what was stored
                del self._jobs[target_position]
                await self._apply(job, request_id, target_position)
        return None

    def _job(self, request_id: str, target_position: int) -> _Job:
        job = self._jobs.get(target_position)
        if job is None:
            self._check(target_position)
            fragments = (fragment for _, fragment in sorted(self._run.state.fragments.items()))
            job = _Job(request_id, tuple((fragment, _version_at(fragment, target_position)) for fragment in fragments))
            self._jobs[target_position] = job
            self._start(self._store(job))
        return job

    def _check(self, target_position: int) -> None:
        status, newest = self._run.state.status, self._run.state.position
        if status not in (RunStatus.OPEN, RunStatus.CLOSING):
            reason = "RUN_DRAFT" if status is RunStatus.DRAFT else "RUN_CLOSED"
            raise SyncerError(reason, f"only a live run can be rolled back. status={status.value}")
        if not 1 <= target_position <= newest:
            raise SyncerError("VERSION_NOT_FOUND", f"no such position. target={target_position}, newest={newest}")

    async def _store(self, job: _Job) -> None:
        try:
            for fragment, source in job.sources:
                if self._is_draining():
                    break
                job.stored.append(await self._stored(job.request_id, fragment, source))
        except StoreError as error:
            job.failure = error
        finally:
            job.ended.set()

    async def _stored(self, request_id: str, fragment: FragmentState, source: VersionState) -> RollbackFragment:
        """Returns what an earlier attempt has stored, on whatever replica, or stores it now."""
        name = f"{self._run.log.prefix}/rollbacks/{request_id}/{fragment.layout.name}"
        with suppress(ObjectMissingError, ValueError):
            noted = read_json(await self._run.log.objects.get(name), RollbackFragment)
            if noted.digest == source.digest and not self._run.state.are_condemned(noted.weights):
                return noted
        stored = await stored_again(self._run, fragment, source, self._workers)
        with suppress(ObjectExistsError):
            await self._run.log.objects.create(name, msgspec.json.encode(stored))
        return stored

    async def _apply(self, job: _Job, request_id: str, target_position: int) -> None:
        if isinstance(job.failure, ObjectMissingError):
            raise SyncerError("VERSION_NOT_FOUND", f"content was collected. {job.failure}") from job.failure
        if job.failure is not None:
            raise job.failure
        if len(job.stored) < len(job.sources):
            raise DrainingError
        for _ in range(_ATTEMPTS):
            newest = self._run.state.fragments
            fragments = tuple(
                structs.replace(stored, version=newest[stored.fragment].version + 1) for stored in job.stored
            )
            (outcome,) = await self._run.log.append([RollbackItem(request_id, target_position, fragments, author())])
            if request_id in self._run.state.requests:
                _LOG.info("run rolled back", run=self._run.spec.name, target_position=target_position)
                with suppress(StoreError):
                    folder = f"{self._run.log.prefix}/rollbacks/{job.request_id}"
                    await self._run.log.objects.delete([f"{folder}/{stored.fragment}" for stored in job.stored])
                return
            if outcome.rejection is not None and outcome.rejection.reason != "VERSION_NOT_FOUND":
                raise from_rejection(outcome.rejection)
        raise SyncerError(
            "STORE_UNAVAILABLE", "a version was committed before each attempt to roll back; retry", retry_after_s=1.0
        )


async def stored_again(run: Run, fragment: FragmentState, source: VersionState, workers: Workers) -> RollbackFragment:
    """Stores the weights of `source` under the fragment's next version number; holds one fragment in memory.

    Raises:
        ObjectMissingError: the weights were collected.
        UnreadableObjectError: they are lost or damaged.
    """
    name = fragment.layout.name
    version = fragment.version + 1
    weights = await Replayer(run, name, workers).weights_at(source.version)
    ref = await run.blobs.write_snapshot(name, version, "weights", snapshot_tensors(fragment.layout, weights))
    return RollbackFragment(name, version, source.version, source.digest, (ref,), ())


def _version_at(fragment: FragmentState, position: int) -> VersionState:
    version = fragment.at(position)
    if version is None:
        raise SyncerError(
            "VERSION_NOT_FOUND",
            "fragment had no version at that position, or it is forgotten. "
            f"fragment={fragment.layout.name}, position={position}, oldest={fragment.oldest}",
        )
    return version
