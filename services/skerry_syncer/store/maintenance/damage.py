"""The kinds of damage in a run, their remedies, and the two operations that every repair consists of.

*Set aside*: a damaged object is copied to a name of its own below `damaged/`, the copy is read back, and only then is
the original deleted. *Put back*: bytes that have the digest that the log names are written under a name that has no
object. So whatever was durable and good stays, and what was damaged can still be looked at.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import StrEnum

from skerry.runtime.identifiers import Entropy
from skerry_syncer.store.errors import ObjectMissingError, StoreUnavailableError
from skerry_syncer.store.log.run_log import RunLog


class Remedy(StrEnum):
    """What is done about a damaged object."""

    NONE = "none"  # nothing can be done here
    SET_ASIDE = "set aside"  # a last log entry goes, so that another can take its number
    RESTORE = "restore"  # the same bytes are put back
    QUARANTINE = "quarantine"  # a delta gets its fate in the log, and its round goes on without it
    FORGET = "forget"  # the object is condemned in the log, as if a collection had taken it


@dataclass(frozen=True)
class Damage:
    """One object that is missing, or is not what the log says."""

    name: str  # relative to the run
    problem: str
    remedy: Remedy
    detail: str  # what the remedy does, or what a person can do
    is_mended: bool = False

    def __str__(self) -> str:
        """Returns it in one line."""
        done = "mended" if self.is_mended else "can be mended" if self.remedy is not Remedy.NONE else "not mended"
        return f"{self.name} {self.problem}; {done}: {self.detail}"


async def set_aside(log: RunLog, name: str, entropy: Entropy) -> None:
    """Moves the damaged object `name` below `damaged/`.

    Raises:
        StoreUnavailableError: the copy is not what was read, or the object changed meanwhile; nothing was deleted.
    """
    path = f"{log.prefix}/{name}"
    copy = f"{log.prefix}/damaged/{name}-{entropy.hex_id()}"
    before = await _digest(log.objects.stream(path))
    await log.objects.write(copy, log.objects.stream(path))
    if {await _digest(log.objects.stream(copy)), await _digest(log.objects.stream(path))} != {before}:
        raise StoreUnavailableError(f"a damaged object changed while it was copied. name={path}, copy={copy}")
    await log.objects.delete([path])
    await log.objects.sync_parent(path)


async def put_back(log: RunLog, name: str, data: bytes | AsyncIterator[bytes], entropy: Entropy) -> None:
    """Gives `name` these bytes, which the caller has compared with the log; what was there is set aside.

    Raises:
        ObjectExistsError: another writer gave it an object meanwhile.
        StoreUnavailableError, StoreFullError: as `set_aside`; or the name has no object now, and this can be repeated.
    """
    path = f"{log.prefix}/{name}"
    try:
        await log.objects.get(path, length=1)
    except ObjectMissingError:
        pass
    else:
        await set_aside(log, name, entropy)
    if isinstance(data, bytes):
        await log.objects.create(path, data)
    else:
        await log.objects.write(path, data)


async def _digest(pieces: AsyncIterator[bytes]) -> str:
    hasher = hashlib.sha256()
    async for piece in pieces:
        hasher.update(piece)
    return hasher.hexdigest()
