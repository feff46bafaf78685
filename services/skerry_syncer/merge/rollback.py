"""Rolls a run back: stores every fragment's older content anew, and then makes it the newest in one log entry.

Storing a large run takes minutes, so it goes on in a task while calls come and go. Only the log entry
changes the run, and only a call appends it, or the gate, so a roll-back whose caller has given up has no effect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final, NamedTuple

from msgspec import structs

from skerry.runtime.logs import get_logger
from skerry.wire.layout import check_id
from skerry_syncer.errors import DrainingError, SyncerError, from_rejection
from skerry_syncer.store.errors import ObjectMissingError, StoreError
from skerry_syncer.store.log.entries import RollbackFragment, RollbackItem, RunStatus
from skerry_syncer.store.log.state import FragmentState, RunState, VersionState
from skerry_syncer.store.versions.replay import Replayer
from skerry_syncer.store.versions.run import Run

_LOG: Final = get_logger(__name__)
# Time after which a call is answered: far below the deadline of any caller.
_ANSWER_S: Final = 2.0


class _Storing(NamedTuple):
    """What one request rolls back to, while it is stored."""

    task: asyncio.Task[StoreError | None]
    stored: list[RollbackFragment]


class RollBacks:
    """The roll-backs of one run on one replica."""

    def __init__(self, run: Run) -> None:
        """Begins without any."""
        self._run = run
        self._begun: dict[str, _Storing] = {}  # by request id

    def end(self) -> None:
        """Gives up what is being stored; a later call begins again, on any replica."""
        for storing in self._begun.values():
            storing.task.cancel()

    async def roll_back(self, request_id: str, target_position: int, caller: str) -> tuple[int, int] | None:
        """Gives every fragment its next version, with the content that it had at `target_position`.

        `caller` is recorded as the author. Returns None when that is done, and after some seconds how many fragments
        are stored, and how many there are; the same call again goes on.

        Raises:
            SyncerError: VERSION_NOT_FOUND: no such position, or the content was collected; RUN_CLOSED, RUN_DRAFT;
                DRAINING.
        """
        check_id(request_id, "request id")
        await self._run.log.tail()
        if request_id in self._run.state.requests:
            return None
        if request_id not in self._begun:
            sources, stored = self._sources(target_position), list[RollbackFragment]()
            self._begun[request_id] = _Storing(asyncio.create_task(self._store(sources, stored)), stored)
        task, stored = self._begun[request_id]
        await asyncio.wait([task], timeout=_ANSWER_S)
        if not task.done():
            return len(stored), len(self._run.state.fragments)
        self._begun.pop(request_id, None)
        if task.cancelled():
            raise DrainingError
        failure = task.result()
        if isinstance(failure, ObjectMissingError):
            raise SyncerError("VERSION_NOT_FOUND", f"content was collected. {failure}") from failure
        if failure is not None:
            raise failure

        def made(state: RunState) -> RollbackItem:
            """Follows the newest version of each fragment, of which another may be committed at any time."""
            fragments = (
                structs.replace(target, version=state.fragments[target.fragment].version + 1) for target in stored
            )
            return RollbackItem(request_id, target_position, tuple(fragments), caller)

        outcome = await self._run.log.append_made(made)
        if outcome.rejection is not None and request_id not in self._run.state.requests:
            raise from_rejection(outcome.rejection)
        _LOG.info("run rolled back", run=self._run.spec.name, target_position=target_position)
        return None

    def _sources(self, target_position: int) -> list[tuple[FragmentState, VersionState]]:
        state = self._run.state
        if state.status not in (RunStatus.OPEN, RunStatus.CLOSING):
            reason = "RUN_DRAFT" if state.status is RunStatus.DRAFT else "RUN_CLOSED"
            raise SyncerError(reason, f"only a live run can be rolled back. status={state.status.value}")
        if not 1 <= target_position <= state.position:
            facts = f"target={target_position}, newest={state.position}"
            raise SyncerError("VERSION_NOT_FOUND", f"no such position. {facts}")
        fragments = (fragment for _, fragment in sorted(state.fragments.items()))
        return [(fragment, _version_at(fragment, target_position)) for fragment in fragments]

    async def _store(
        self, sources: Iterable[tuple[FragmentState, VersionState]], stored: list[RollbackFragment]
    ) -> StoreError | None:
        """Returns why it could not store all, for the next call, which there may not be."""
        try:
            for fragment, source in sources:
                stored.append(await stored_again(self._run, fragment, source))
        except StoreError as error:
            return error
        return None


async def stored_again(run: Run, fragment: FragmentState, source: VersionState) -> RollbackFragment:
    """Stores the weights of `source` under the fragment's next version number; holds one fragment in memory.

    Raises:
        ObjectMissingError: the weights were collected.
        UnreadableObjectError: they are lost or damaged.
    """
    name = fragment.layout.name
    version = fragment.version + 1
    weights = await Replayer(run, name).weights_at(source.version)
    ref = await run.blobs.write_snapshot(fragment.layout, version, "weights", weights)
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
