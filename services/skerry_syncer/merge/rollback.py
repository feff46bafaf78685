"""Rolls a run back: stores every fragment's older content anew, and then makes it the newest in one log entry.

Storing a large run takes minutes, so it goes on in a task of the replica while calls come and go. Only the log entry
changes the run, and only a call appends it, so a roll-back whose caller has given up has no effect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from msgspec import structs

from skerry.runtime.logs import get_logger
from skerry.runtime.workers import Workers
from skerry.wire.layout import check_id
from skerry_syncer.access.caller import author
from skerry_syncer.errors import DrainingError, SyncerError, from_rejection
from skerry_syncer.store.errors import ObjectMissingError, StoreError
from skerry_syncer.store.log.entries import RollbackFragment, RollbackItem, RunStatus
from skerry_syncer.store.log.state import FragmentState, RunState, VersionState
from skerry_syncer.store.versions.replay import Replayer, snapshot_tensors
from skerry_syncer.store.versions.run import Run

_LOG: Final = get_logger(__name__)
# Time after which a call is answered: far below the deadline of any caller.
_ANSWER_S: Final = 2.0


class Progress(NamedTuple):
    """How many of a run's fragments are stored for a roll-back."""

    stored_count: int
    fragment_count: int


@dataclass
class _Job:
    """The storing of what one request rolls back to."""

    sources: tuple[tuple[FragmentState, VersionState], ...]
    stored: list[RollbackFragment] = field(default_factory=list)
    failure: StoreError | None = None
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
        self._jobs: dict[str, _Job] = {}  # by request id

    async def roll_back(self, request_id: str, target_position: int) -> Progress | None:
        """Gives every fragment its next version, with the content that it had at `target_position`.

        Returns None when that is done, and after some seconds how far it is; the same call again goes on.

        Raises:
            SyncerError: VERSION_NOT_FOUND: no such position, or the content was collected; RUN_CLOSED, RUN_DRAFT;
                DRAINING.
        """
        check_id(request_id, "request id")
        if request_id in self._run.state.requests:
            return None
        await self._run.log.tail()
        if request_id in self._run.state.requests:
            return None
        job = self._jobs.get(request_id) or self._begun(request_id, target_position)
        with suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                await job.ended.wait()
        if not job.ended.is_set():
            return Progress(len(job.stored), len(job.sources))
        self._jobs.pop(request_id, None)
        await self._apply(job, request_id, target_position)
        return None

    def _begun(self, request_id: str, target_position: int) -> _Job:
        state = self._run.state
        if state.status not in (RunStatus.OPEN, RunStatus.CLOSING):
            reason = "RUN_DRAFT" if state.status is RunStatus.DRAFT else "RUN_CLOSED"
            raise SyncerError(reason, f"only a live run can be rolled back. status={state.status.value}")
        if not 1 <= target_position <= state.position:
            facts = f"target={target_position}, newest={state.position}"
            raise SyncerError("VERSION_NOT_FOUND", f"no such position. {facts}")
        fragments = (fragment for _, fragment in sorted(state.fragments.items()))
        job = _Job(tuple((fragment, _version_at(fragment, target_position)) for fragment in fragments))
        self._jobs[request_id] = job
        self._start(self._store(job))
        return job

    async def _store(self, job: _Job) -> None:
        try:
            for fragment, source in job.sources:
                if self._is_draining():
                    break
                job.stored.append(await stored_again(self._run, fragment, source, self._workers))
        except StoreError as error:
            job.failure = error
        finally:
            job.ended.set()

    async def _apply(self, job: _Job, request_id: str, target_position: int) -> None:
        if isinstance(job.failure, ObjectMissingError):
            raise SyncerError("VERSION_NOT_FOUND", f"content was collected. {job.failure}") from job.failure
        if job.failure is not None:
            raise job.failure
        if len(job.stored) < len(job.sources):
            raise DrainingError
        caller = author()

        def made(state: RunState) -> RollbackItem:
            """Follows the newest version of each fragment, of which another may be committed at any time."""
            fragments = (
                structs.replace(stored, version=state.fragments[stored.fragment].version + 1) for stored in job.stored
            )
            return RollbackItem(request_id, target_position, tuple(fragments), caller)

        outcome = await self._run.log.append_made(made)
        if outcome.rejection is not None and request_id not in self._run.state.requests:
            raise from_rejection(outcome.rejection)
        _LOG.info("run rolled back", run=self._run.spec.name, target_position=target_position)


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
