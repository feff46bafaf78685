"""Log checkpoints: objects that have the whole state of the fold at a position, so that opening a run reads little.

    checkpoints/<position>-<write id>    the state, written by any replica
    a checkpoint item in a later entry   names the object and its digest; only then is it used

A reader lists the objects and takes the newest one that an entry soon after its position names, whose bytes have the
digest that the entry says, and whose state ends in the entry that the log has at the position. If one is missing,
damaged or of another format, the one before is taken, and without any the log is folded from its first entry.

The object is JSON with the fields of the state's own classes. What follows from others is left out: layouts, which
`run.json` has, pending deltas, and which delta a session has from which base.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable
from typing import Any, Final, get_type_hints

import msgspec

from skerry.runtime.identifiers import Entropy
from skerry.runtime.logs import get_logger
from skerry_syncer.store.errors import ObjectMissingError, StoreError
from skerry_syncer.store.log.entries import (
    FORMAT,
    CheckpointItem,
    Entry,
    Fate,
    RunSpec,
    RunStatus,
    bytes_digest,
    check_format,
    entry_name,
    run_prefix,
)
from skerry_syncer.store.log.retention import kept_positions, oldest_versions
from skerry_syncer.store.log.run_log import RunLog
from skerry_syncer.store.log.state import DeltaState, FragmentState, RunState, VersionState
from skerry_syncer.store.objects.interface import Objects, read_json

_LOG: Final = get_logger(__name__)
# Entries between two checkpoints: folding as many takes less than reading a checkpoint of a run that is large.
CHECKPOINT_EVERY: Final = 1024
# Entries after a checkpoint's position among which its name is looked for. A slower writer's is not used.
_NAMED_WITHIN: Final = 512
_READ_AT_ONCE: Final = 64
# How many of the newest checkpoints stay: more than one, because the newest may be damaged.
KEPT_CHECKPOINTS: Final = 4
_FOLDER: Final = "checkpoints"
_NAME: Final = re.compile(r"(\d{20})-[0-9a-f]{32}")


async def newest_state(objects: Objects, spec: RunSpec, *, at_most: int | None = None) -> RunState:
    """Returns the state of the newest checkpoint, at or before `at_most`; without one, that before the first entry.

    Raises:
        StoreUnavailableError: the store can't be read.
    """
    prefix = run_prefix(spec.name, spec.uid)
    async for name, position in _stored(objects, prefix):
        if at_most is not None and position > at_most:
            continue
        try:
            return await _load(objects, spec, name, position)
        except (ObjectMissingError, ValueError) as error:
            _LOG.warning("checkpoint is not used", run=spec.name, name=name, cause=str(error))
    return RunState(spec)


def checkpoint_of(state: RunState, entropy: Entropy) -> tuple[CheckpointItem, bytes]:
    """Returns the item that names a checkpoint of the state as it is now, and the bytes of its object."""
    data = state_to_bytes(state)
    name = f"{_FOLDER}/{state.position:020}-{entropy.hex_id()}"
    kept_since, kept = kept_positions(state, state.policy)
    oldest = oldest_versions(state)
    return CheckpointItem(state.position, name, len(data), bytes_digest(data), oldest, kept_since, tuple(kept)), data


def is_due(state: RunState, every: int = CHECKPOINT_EVERY) -> bool:
    """Whether the log has grown by `every` entries since its newest checkpoint."""
    return state.status is not RunStatus.DRAFT and state.position - state.checkpoint_at >= every


async def write_checkpoint(log: RunLog) -> None:
    """Stores the state of the log as it is now, names it by an entry, and deletes old checkpoints.

    If several replicas do this at the same time, one succeeds and the others delete theirs.

    Raises:
        StoreError: the store failed.
    """
    item, data = checkpoint_of(log.state, log.entropy)
    path = f"{log.prefix}/{item.name}"
    await log.objects.write(path, data)
    try:
        (outcome,) = await log.append([item])
    except StoreError:  # an entry that names it may still land; no reader depends on it
        await log.objects.delete([path])
        raise
    if outcome.rejection is not None:
        await log.objects.delete([path])
        return
    stored = [checkpoint async for checkpoint in _stored(log.objects, log.prefix)]
    newest = sorted({position for _, position in stored})[-KEPT_CHECKPOINTS:]
    old = [f"{log.prefix}/{name}" for name, position in stored if position < newest[0]]
    if old:
        await log.objects.delete(old)


async def _stored(objects: Objects, prefix: str) -> AsyncIterator[tuple[str, int]]:
    """Yields the names of checkpoints and their positions, the newest first."""
    folder = f"{prefix}/{_FOLDER}/"
    names = [info.name.removeprefix(folder) async for info in objects.list(folder)]
    for match in sorted(filter(None, map(_NAME.fullmatch, names)), key=lambda match: match[0], reverse=True):
        yield f"{_FOLDER}/{match[0]}", int(match[1])


async def _load(objects: Objects, spec: RunSpec, name: str, position: int) -> RunState:
    prefix = run_prefix(spec.name, spec.uid)
    item = await _naming_item(objects, prefix, name, position)
    data = b"".join([piece async for piece in objects.stream(f"{prefix}/{name}")])
    if bytes_digest(data) != item.digest:
        raise ValueError(f"checkpoint is damaged. size_bytes={len(data)}, expected_size_bytes={item.size_bytes}")
    state = state_from_bytes(data, spec)
    entry = await objects.get(entry_name(prefix, position))
    if (state.position, state.head_digest) != (position, bytes_digest(entry)):
        raise ValueError(f"checkpoint is of another log. position={state.position}")
    return state


async def _naming_item(objects: Objects, prefix: str, name: str, position: int) -> CheckpointItem:
    """Returns the item that names the checkpoint of `position`.

    Raises:
        ObjectMissingError: the log ends before one.
        ValueError: an entry can't be read, or there is none near the position.
    """
    for start in range(position + 1, position + 1 + _NAMED_WITHIN, _READ_AT_ONCE):
        names = (entry_name(prefix, number) for number in range(start, start + _READ_AT_ONCE))
        for data in await asyncio.gather(*map(objects.get, names), return_exceptions=True):
            if isinstance(data, BaseException):
                raise data
            for item in Entry.from_bytes(data).items:
                if isinstance(item, CheckpointItem) and (item.name, item.at) == (name, position):
                    return item
    raise ValueError("no entry names it")


def _fields(kind: type, *others: str) -> dict[str, Any]:
    """Returns the types of the class's fields by name, without those that are saved in another way or not at all."""
    return {name: hint for name, hint in get_type_hints(kind).items() if name not in others}


_FRAGMENT: Final = _fields(FragmentState, "layout", "pending", "versions")
_RUN: Final = _fields(RunState, "spec", "bases", "fragments", "deltas")
_SavedFragment: Any = msgspec.defstruct("_SavedFragment", [*_FRAGMENT.items(), ("versions", list[VersionState])])
_SavedRun: Any = msgspec.defstruct(
    "_SavedRun",
    [
        ("format", int),
        ("run_uid", str),
        *_RUN.items(),
        ("fragments", dict[str, _SavedFragment]),
        ("deltas", list[DeltaState]),  # in log order
    ],
)


def _values(source: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}


def state_to_bytes(state: RunState) -> bytes:
    """Returns the state; equal states give equal bytes."""
    fragments = {
        name: _SavedFragment(**_values(fragment, _FRAGMENT), versions=list(fragment.versions.values()))
        for name, fragment in state.fragments.items()
    }
    deltas = list(state.deltas.values())
    saved = _SavedRun(FORMAT, state.spec.uid, **_values(state, _RUN), fragments=fragments, deltas=deltas)
    return msgspec.json.encode(saved, order="deterministic")


def state_from_bytes(data: bytes, spec: RunSpec) -> RunState:
    """Returns the state that `state_to_bytes` gave.

    Raises:
        ValueError: not a state of this run that this version reads.
    """
    saved = read_json(data, _SavedRun)
    check_format(saved.format)
    if saved.run_uid != spec.uid:
        raise ValueError(f"not this run's checkpoint. run_uid={saved.run_uid}")
    state = RunState(spec, **_values(saved, _RUN))
    if saved.fragments.keys() != state.fragments.keys():
        raise ValueError("checkpoint is of other fragments")
    state.deltas = {delta.item.delta: delta for delta in saved.deltas}
    for name, fragment in saved.fragments.items():
        versions = {version.version: version for version in fragment.versions}
        layout = spec.fragment(name)
        state.fragments[name] = FragmentState(layout, **_values(fragment, _FRAGMENT), versions=versions)
    try:
        _derive(state)
    except KeyError as error:
        raise ValueError(f"checkpoint names a fragment that the run has not. fragment={error}") from error
    return state


def _derive(state: RunState) -> None:
    """Finds what the bytes leave out: pending deltas, and the last delta of a session from each base."""
    closings = [fragment.closing for fragment in state.fragments.values() if fragment.closing is not None]
    frozen = {member.delta for closing in closings for member in closing.members}
    for name, delta in state.deltas.items():
        fragment = state.fragments[delta.item.fragment]
        if delta.fate is Fate.PENDING and name not in frozen:
            fragment.pending[name] = delta
        if delta.item.base_version >= fragment.oldest:
            state.bases[delta.item.session, delta.item.fragment, delta.item.base_version] = name
