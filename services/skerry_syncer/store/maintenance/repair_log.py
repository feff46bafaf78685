"""Finds the damaged entry of a run's log, and mends it where that is certain.

An entry is certain by the digest that the next entry has of it. No entry confirms the last one. If it is cut off, its
writer stopped before it could acknowledge it, so it is set aside. If it is whole, a replica may have acted on it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final, NamedTuple

from skerry.runtime.identifiers import Entropy
from skerry.runtime.workers import Workers
from skerry_syncer.store.errors import ObjectMissingError
from skerry_syncer.store.log.entries import Entry, bytes_digest, entry_name
from skerry_syncer.store.log.run_log import RunLog
from skerry_syncer.store.maintenance.damage import Damage, Remedy, put_back, set_aside
from skerry_syncer.store.maintenance.inspection import last_stored_position, what_is_wrong_after

# The search for one wrong bit hashes an entry eight times a byte: some seconds for this size, hours for a megabyte.
_MOST_SEARCHED_BYTES: Final = 2**16


class LogDamage(NamedTuple):
    """The damage of a log, and the bytes that its entry must have, where they are known."""

    damage: Damage
    restored: bytes | None = None


async def open_mended(
    open_log: Callable[[], Awaitable[RunLog]], workers: Workers, entropy: Entropy, *, acts: bool, gives_up: bool
) -> tuple[RunLog, list[Damage]]:
    """Returns the log, and its damages in order: all of them if `acts` mends them, else up to the first.

    `open_log` must not remember what it has read: that may have been damaged.

    Raises:
        StoreError: the store can't be used; repeating is safe.
    """
    found: list[Damage] = []
    while True:
        log = await open_log()
        one = await find_log_damage(log, workers, gives_up=gives_up)
        if one is None:
            return log, found
        if not acts or one.damage.remedy is Remedy.NONE:
            return log, [*found, one.damage]
        found.append(await _mended(log, one, entropy))


async def find_log_damage(log: RunLog, workers: Workers, *, gives_up: bool) -> LogDamage | None:
    """Returns the first damage of the log, or None if it can be followed to its end; changes nothing.

    With `gives_up`, a last entry that is whole but damaged is set aside too.
    """
    cause = await what_is_wrong_after(log)
    if cause is None:
        return None
    at = log.state.position + 1
    data, following = await _stored(log, at), await _stored(log, at + 1)
    entry, witness = _entry(data), _previous(following)
    if entry is not None and (following is None or _previous(following) == bytes_digest(data or b"")):
        # The entry is sound, and says another digest of its predecessor than that one has.
        at, data, witness = at - 1, await _stored(log, at - 1), entry.previous
    name = entry_name("", at).removeprefix("/")
    if witness is not None:
        restored = await workers.run(with_one_bit_changed, data or b"", witness)
        if restored is not None:
            return LogDamage(Damage(name, "has one wrong bit", Remedy.RESTORE, "the bit is put right"), restored)
    problem = "is missing" if data is None else f"can't be read or does not follow ({len(data)} bytes)"
    if data is not None and at > 0 and at == await last_stored_position(log):
        return LogDamage(_last_entry(name, data, gives_up=gives_up))
    known = f", as the object with the SHA-256 {witness}" if witness is not None else ""
    detail = f"restore it from a backup{known}; until then the run can be read up to position {log.state.position}"
    return LogDamage(Damage(name, problem, Remedy.NONE, detail))


def _last_entry(name: str, data: bytes, *, gives_up: bool) -> Damage:
    if not data.rstrip(b"\0").endswith(b"}"):
        problem = f"is the last entry and has no end ({len(data)} bytes)"
        return Damage(name, problem, Remedy.SET_ASIDE, "its writer was cut off and told nobody that it was written")
    problem = f"is the last entry and can't be read, though it is whole ({len(data)} bytes)"
    if gives_up:
        return Damage(name, problem, Remedy.SET_ASIDE, "what was acknowledged with it is lost")
    detail = "restore it from a backup, or set it aside by --give-up; then what was acknowledged with it is lost"
    return Damage(name, problem, Remedy.NONE, detail)


async def _mended(log: RunLog, found: LogDamage, entropy: Entropy) -> Damage:
    if found.restored is not None:
        await put_back(log, found.damage.name, found.restored, entropy)
    else:
        await set_aside(log, found.damage.name, entropy)
    return replace(found.damage, is_mended=True)


def with_one_bit_changed(data: bytes, digest: str) -> bytes | None:
    """Returns the bytes with this SHA-256 that differ from `data` in one bit, or None if there are none."""
    if len(data) > _MOST_SEARCHED_BYTES:
        return None
    before = hashlib.sha256()
    for at, byte in enumerate(data):
        for bit in range(8):
            hasher = before.copy()
            hasher.update(bytes([byte ^ (1 << bit)]) + data[at + 1 :])
            if hasher.hexdigest() == digest:
                return data[:at] + bytes([byte ^ (1 << bit)]) + data[at + 1 :]
        before.update(data[at : at + 1])
    return None


async def _stored(log: RunLog, position: int) -> bytes | None:
    try:
        return await log.objects.get(entry_name(log.prefix, position))
    except ObjectMissingError:
        return None


def _entry(data: bytes | None) -> Entry | None:
    try:
        return None if data is None else Entry.from_bytes(data)
    except ValueError:
        return None


def _previous(data: bytes | None) -> str | None:
    entry = _entry(data)
    return None if entry is None else entry.previous
