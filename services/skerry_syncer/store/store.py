"""All runs of one object store: drafts, names and logs.

A run is created as a draft, which is reachable by its uid only; publishing gives it its name. Numbered objects,
`runs/<run>/names/<number>`, say which uid a name means: the highest number counts, and a null means deleted.
"""

from __future__ import annotations

import asyncio
import dataclasses
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from skerry.runtime.clock import Clock
from skerry.runtime.identifiers import Entropy
from skerry.runtime.logs import get_logger
from skerry.runtime.workers import Workers
from skerry.wire.layout import BadNameError, check_id, check_name
from skerry_syncer.store.errors import (
    DraftConflictError,
    LogCorruptError,
    NewerFormatError,
    ObjectMissingError,
    RunExistsError,
    RunNotFoundError,
)
from skerry_syncer.store.log.checkpoints import newest_state
from skerry_syncer.store.log.entries import FORMAT, RunSpec, canonical_json, check_format, entry_name, run_prefix
from skerry_syncer.store.log.run_log import RunLog
from skerry_syncer.store.objects.interface import Objects, read_json
from skerry_syncer.store.objects.put_if_absent import create_or_read
from skerry_syncer.store.versions.run import Run

_LOG: Final = get_logger(__name__)
_RESOLVES_AT_ONCE: Final = 16


class Store:
    """The runs of an object store, as one replica uses them. Safe for concurrent use by tasks of one loop."""

    def __init__(
        self,
        objects: Objects,
        *,
        clock: Clock,
        entropy: Entropy,
        workers: Workers,
        writer: str,
    ) -> None:
        """`writer` names this replica in the entries that it writes, for people."""
        self.objects = objects
        self.clock = clock
        self.entropy = entropy
        self.workers = workers
        self._writer = writer
        self._created = partial(create_or_read, objects, clock=clock, entropy=entropy)
        # One object per run: two would not know of each other's entries in doubt.
        self._runs: dict[tuple[str, str], Run] = {}
        # Of logs that were let go: the newest entry seen, which they must still have when they are opened again.
        self._known: dict[tuple[str, str], tuple[int, str]] = {}

    async def create_draft(self, spec: RunSpec) -> Run:
        """Creates a run without a name and returns its log; the same spec again returns the same run.

        The time of creation is not compared; that of the first creation is kept.

        Raises:
            DraftConflictError: the uid has other tensors or another plan.
            OutcomeUnknownError, StoreFullError: as for RunLog.append; repeating is safe.
        """
        name = entry_name(run_prefix(spec.name, spec.uid), 0)
        data = await self._created(name, await self.workers.run(spec.to_bytes))
        created = await self.workers.run(_parse_spec, name, data)
        same = dataclasses.replace(created, created_at_unix_s=spec.created_at_unix_s)
        if not await self.workers.run(operator.eq, same, spec):  # of many tensors it takes long
            raise DraftConflictError(
                f"run was created with other tensors or fragments. run={spec.name}, uid={spec.uid}"
            )
        return await self._open(created)

    async def open_run(self, name: str, uid: str) -> Run:
        """Returns the run's log, folded to its end. Drafts and deleted runs can be opened too.

        A log that failed is read again from the start, because the store may have been repaired or its volume mounted
        again. It must still have everything that this process has seen in it.

        Raises:
            RunNotFoundError: there is no run of that name with that uid.
            LogCorruptError: the log can't be read as one, or lost what it had.
        """
        check_name(name, "run")
        check_id(uid, "run uid")
        run = self._runs.get((name, uid))
        if run is not None and run.log.failure is None:
            await run.log.tail()
            return run
        spec_name = entry_name(run_prefix(name, uid), 0)
        try:
            data = await self.objects.get(spec_name)
        except ObjectMissingError:
            if run is not None and run.log.failure is not None:
                raise run.log.failure from None  # the run existed, so it is lost and not unknown
            raise RunNotFoundError(f"run does not exist. run={name}, uid={uid}") from None
        await self.objects.sync_parent(spec_name)
        return await self._open(await self.workers.run(_parse_spec, spec_name, data))

    def read_position(self, name: str, uid: str) -> int:
        """Returns up to where the run's log was read; 0 if it is not open."""
        run = self._runs.get((name, uid))
        return 0 if run is None else run.state.position

    async def read_run(self, name: str, uid: str) -> Run:
        """Returns the run's log for reading, folded to its end or, where it is damaged, to its last good entry.

        `failure` of the log says what is wrong with the entry after that one. Nothing can be appended to such a log.

        Raises:
            RunNotFoundError: as `open_run`.
            LogCorruptError: `run.json` can't be read.
        """
        try:
            return await self.open_run(name, uid)
        except LogCorruptError:
            run = self._runs.get((name, uid))
            if run is None or run.log.failure is None:
                raise
            return run

    async def _open(self, spec: RunSpec) -> Run:
        key = (spec.name, spec.uid)
        opened = self._runs.get(key)
        if opened is None or opened.log.failure is not None:
            state = await newest_state(self.objects, spec)
            if self._runs.get(key) is not opened:  # another call opened it meanwhile
                return await self._open(spec)
            log = RunLog(
                self.objects,
                spec,
                clock=self.clock,
                entropy=self.entropy,
                writer=self._writer,
                known=self._known.get(key) if opened is None else opened.log.known,
                state=state,
            )
            self._runs[key] = Run(log, self.workers)
            if opened is not None:
                await opened.log.close()  # entries that it sent are treated as another process's from now on
        run = self._runs[key]
        await run.log.tail()
        return run

    def release(self, run: Run) -> None:
        """Lets go of a run that is not in use; the next call of `open_run` reads its log anew."""
        key = (run.spec.name, run.spec.uid)
        if self._runs.get(key) is run:
            del self._runs[key]
            self._known[key] = run.log.known

    async def publish(self, name: str, uid: str) -> None:
        """Gives the run its name. Idempotent.

        A run that lost its name never gets it back, so that a late repetition can't undo a deletion.

        Raises:
            RunNotFoundError: the run was deleted.
            RunExistsError: another run has the name; `uid` of the error says which.
            OutcomeUnknownError, StoreFullError: as for RunLog.append; repeating is safe.
        """
        check_id(uid, "run uid")
        history = await self.name_history(name)
        if uid in history and history[-1] is None:
            raise RunNotFoundError(f"run was deleted. run={name}, uid={uid}")
        current = await self._change_name(name, history, before=None, after=uid)
        if current is not None and current != uid:
            raise RunExistsError(f"another run has that name. run={name}, uid={current}", uid=current)

    async def unpublish(self, name: str, uid: str) -> None:
        """Takes the name from the run; its objects stay. Idempotent: a name that is free already stays so.

        Raises:
            RunNotFoundError: the name belongs to another run.
            OutcomeUnknownError, StoreFullError: as for RunLog.append; repeating is safe.
        """
        current = await self._change_name(name, await self.name_history(name), before=uid, after=None)
        if current is not None:
            raise RunNotFoundError(f"another run has that name. run={name}, uid={current}")

    async def _change_name(
        self, name: str, history: Sequence[str | None], *, before: str | None, after: str | None
    ) -> str | None:
        """Makes a name that means `before` mean `after`, and returns what it means then, which others may decide."""
        number, current = len(history), history[-1] if history else None
        # Equal bytes mean the same thing from every writer, so they need no write id.
        data = canonical_json({"format": FORMAT, "uid": after})
        while current == before:
            number += 1
            current = _parse_name(name, await self._created(_name_path(name, number), data))
        return current

    async def resolve(self, name: str) -> str | None:
        """Returns the uid of the run that has the name; None if none has.

        Raises:
            LogCorruptError: as `name_history`.
        """
        history = await self.name_history(name)
        return history[-1] if history else None

    async def name_history(self, name: str) -> list[str | None]:
        """Returns the uids that the name has meant, in order; None where it was free.

        Raises:
            LogCorruptError: an object of the name can't be read.
        """
        check_name(name, "run")
        history: list[str | None] = []
        while True:
            try:
                data = await self.objects.get(_name_path(name, len(history) + 1))
            except ObjectMissingError:
                break
            history.append(_parse_name(name, data))
        if history:
            await self.objects.sync_parent(_name_path(name, len(history)))
        return history

    async def list_runs(self, names: Sequence[str] | None = None) -> list[tuple[str, str]]:
        """Returns (name, uid) of every run that has a name, or of those of `names` that have one, in order.

        Runs whose name can't be read, and folders that are not runs, are left out.
        """
        limit = asyncio.Semaphore(_RESOLVES_AT_ONCE)

        async def uid_of(name: str) -> str | None:
            async with limit:
                try:
                    return await self.resolve(name)
                except (BadNameError, LogCorruptError, NewerFormatError) as error:
                    _LOG.warning("run is left out of a listing", run=name, cause=str(error))
                    return None

        names = await self.objects.folders("runs") if names is None else names
        uids = await asyncio.gather(*(uid_of(name) for name in names))
        return [(name, uid) for name, uid in zip(names, uids, strict=True) if uid is not None]

    async def close(self) -> None:
        """Closes every log."""
        for run in self._runs.values():
            await run.log.close()
        self._runs.clear()


def _name_path(name: str, number: int) -> str:
    return f"runs/{name}/names/{number:020}"


def _parse_name(name: str, data: bytes) -> str | None:
    try:
        values = read_json(data, dict[str, Any])
        check_format(values["format"])
        uid: str | None = values["uid"]
        return uid if uid is None else check_id(uid, "run uid")
    except (ValueError, KeyError, TypeError) as error:
        raise LogCorruptError(f"name object can't be read. run={name}, cause={error!r}") from error


def _parse_spec(name: str, data: bytes) -> RunSpec:
    try:
        spec = RunSpec.from_bytes(data)
        # Both are kept; of many tensors they take long, and this is a worker thread.
        spec.digest, [layout.numel for layout in spec.fragments]
        return spec
    except (ValueError, KeyError, TypeError) as error:
        raise LogCorruptError(f"run.json can't be read. name={name}, cause={error!r}") from error
