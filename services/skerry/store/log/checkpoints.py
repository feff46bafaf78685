"""Log checkpoints: objects that have the whole state of the fold at a position, so that opening a run reads little.

    checkpoints/<position>-<write id>    the state, written by any replica
    a checkpoint item in a later entry   names the object and its digest; only then is it used

A reader lists the objects and takes the newest one that an entry soon after its position names, whose bytes have the
digest that the entry says, and whose state ends in the entry that the log has at the position. If one is missing,
damaged or of another format, the one before is taken, and without any the log is folded from its first entry.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Final

import structlog

from skerry.runtime.identifiers import Entropy
from skerry.store.errors import ObjectMissingError
from skerry.store.log.entries import CheckpointItem, Entry, RunSpec, bytes_digest, entry_name, run_prefix
from skerry.store.log.horizon import oldest_versions
from skerry.store.log.saved import state_from_bytes, state_to_bytes
from skerry.store.log.state import RunState
from skerry.store.objects.interface import Objects

_LOG: Final = structlog.get_logger(__name__)
# Entries between two checkpoints: folding as many takes less than reading a checkpoint of a run that is large.
CHECKPOINT_EVERY: Final = 1024
# Entries after a checkpoint's position among which its name is looked for. A writer that is slower than that tries anew.
_NAMED_WITHIN: Final = 512
_READ_AT_ONCE: Final = 64
# Checkpoints that stay, the newest ones: more than one, because the newest may be damaged.
_KEPT: Final = 4
_FOLDER: Final = "checkpoints"
_NAME: Final = re.compile(r"(\d{20})-[0-9a-f]{32}")


async def newest_state(objects: Objects, spec: RunSpec, *, at_most: int | None = None) -> RunState:
    """Returns the state of the newest checkpoint, at or before `at_most`; without one, that before the first entry.

    Raises:
        StoreUnavailableError: the store can't be read.
    """
    prefix = run_prefix(spec.name, spec.uid)
    async for name, position in _found(objects, prefix):
        if at_most is not None and position > at_most:
            continue
        try:
            return await _load(objects, spec, name, position)
        except (ObjectMissingError, ValueError) as error:
            _LOG.warning("checkpoint is not used", run=spec.name, name=name, cause=str(error))
    return RunState(spec, forgets=True)


def checkpoint_of(state: RunState, entropy: Entropy) -> tuple[CheckpointItem, bytes]:
    """Returns the item that names a checkpoint of the state as it is now, and the bytes of its object."""
    data = state_to_bytes(state)
    name = f"{_FOLDER}/{state.position:020}-{entropy.hex_id()}"
    return CheckpointItem(state.position, name, len(data), bytes_digest(data), oldest_versions(state)), data


async def remove_old_checkpoints(objects: Objects, spec: RunSpec) -> None:
    """Deletes all checkpoints but the newest ones; a reader that meets one that is gone takes another.

    Raises:
        StoreUnavailableError: the store can't be used.
    """
    prefix = run_prefix(spec.name, spec.uid)
    names = [name async for name, _ in _found(objects, prefix)]
    if names[_KEPT:]:
        await objects.delete([f"{prefix}/{name}" for name in names[_KEPT:]])


async def _found(objects: Objects, prefix: str) -> AsyncIterator[tuple[str, int]]:
    """Yields the names of checkpoints and their positions, the newest first."""
    folder = f"{prefix}/{_FOLDER}/"
    names = [info.name.removeprefix(folder) async for info in objects.list(folder)]
    for match in sorted(filter(None, map(_NAME.fullmatch, names)), key=lambda match: match[0], reverse=True):
        yield f"{_FOLDER}/{match[0]}", int(match[1])


async def _load(objects: Objects, spec: RunSpec, name: str, position: int) -> RunState:
    prefix = run_prefix(spec.name, spec.uid)
    entry, item = await asyncio.gather(
        objects.get(entry_name(prefix, position)), _naming_item(objects, prefix, name, position)
    )
    data = await objects.get(f"{prefix}/{name}")
    if bytes_digest(data) != item.digest:
        raise ValueError(f"checkpoint is damaged. size_bytes={len(data)}, expected_size_bytes={item.size_bytes}")
    state = state_from_bytes(data, spec)
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
        names = (entry_name(prefix, at) for at in range(start, start + _READ_AT_ONCE))
        for data in await asyncio.gather(*map(objects.get, names), return_exceptions=True):
            if isinstance(data, BaseException):
                raise data
            for item in Entry.from_bytes(data).items:
                if isinstance(item, CheckpointItem) and (item.name, item.at) == (name, position):
                    return item
    raise ValueError("no entry names it")
