"""The interface to object storage.

Needed: read after write, put-if-absent, range reads, listing. Names are '/'-separated relative paths of the characters
`A-Z a-z 0-9 . _ -`. Objects are immutable: a name is written once, and never again after it was deleted.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from typing import Final, NamedTuple, Protocol, TypeVar

import msgspec

T = TypeVar("T")

# A blob's bytes: at hand, or as they come.
Chunks = bytes | Sequence[bytes | memoryview] | AsyncIterator[bytes]
# Large enough that the cost of a call is small, small enough to hold many. A message of a piece fits in 2^19 bytes.
STREAM_CHUNK_BYTES: Final = 2**19 - 64
_NAME: Final = re.compile(r"[A-Za-z0-9._-]+(?:/[A-Za-z0-9._-]+)*")


class ObjectInfo(NamedTuple):
    """An object as listing shows it."""

    name: str
    size_bytes: int
    modified_at_unix_s: float  # by the object store's clock


class Objects(Protocol):
    """An object store, as far as Skerry uses it. Safe for concurrent use by tasks of one loop.

    Every method raises StoreUnavailableError where the store can't be reached or refuses.
    """

    async def create(self, name: str, data: bytes) -> None:
        """Puts an object that must not exist. When it returns, the object is durable.

        After any error the object may or may not exist: read it back (`skerry_syncer.store.objects.put_if_absent`).

        Raises:
            ObjectExistsError: the store says that the name is taken.
            StoreFullError: no space.
        """

    async def get(self, name: str) -> bytes:
        """Returns the object's bytes.

        Raises:
            ObjectMissingError: there is no such object.
        """

    async def write(self, name: str, chunks: Chunks) -> None:
        """Puts a blob whose name no other writer uses. Durable when it returns.

        If it raises, the name has no object or the whole blob.

        Raises:
            StoreFullError: no space.
        """

    def stream(self, name: str, *, offset: int = 0) -> AsyncIterator[bytes]:
        """Yields the object's bytes from `offset` in pieces of at most `STREAM_CHUNK_BYTES`.

        No request of it takes long, however large the object is. An error may come between two pieces; the same call
        with a later offset goes on from there.

        Raises:
            ObjectMissingError: there is no such object.
        """

    async def folders(self, prefix: str) -> list[str]:
        """Returns the names of the folders directly below the folder `prefix`, sorted, without the prefix."""

    def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Yields every object below the folder `prefix`, in any order. Objects written meanwhile may be left out."""

    async def delete(self, names: Sequence[str]) -> None:
        """Deletes these objects; names that do not exist are ignored."""

    async def sync_parent(self, *names: str) -> None:
        """Makes names in one folder, which another process wrote, survive a power cut. Costly, the first time."""


def check_object_name(name: str) -> str:
    """Returns `name` if it is legal.

    Raises:
        ValueError: it is not.
    """
    if _NAME.fullmatch(name) is None or any(part in (".", "..") for part in name.split("/")):
        raise ValueError(f"object name is not legal. name={name[:200]!r}")
    return name


def folder_of(prefix: str) -> str:
    """Returns `prefix` with exactly one '/' at its end; the empty prefix stays empty."""
    return f"{prefix.rstrip('/')}/" if prefix else ""


def read_json(data: bytes, kind: type[T]) -> T:
    """Returns the value of this type that `data` holds.

    Raises:
        ValueError: it holds none, or is nested deeper than anything that Skerry writes.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError as error:
        raise ValueError("JSON is nested too deeply") from error
