"""An object store whose calls are timed, and whose failures are counted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

from skerry.runtime.clock import Clock
from skerry_syncer.run.metrics import SyncerMetrics
from skerry_syncer.store.errors import StoreFullError, StoreUnavailableError
from skerry_syncer.store.objects.interface import Chunks, ObjectInfo, Objects

T = TypeVar("T")

_END: Final = object()
_OPERATIONS: Final = ("create", "get", "write", "stream", "folders", "list", "delete", "sync_parent")
_FAILURES: Final = (StoreUnavailableError, StoreFullError)


class MeasuredObjects:
    """Passes every call on to `objects`.

    A missing object and a name that is taken are answers, not failures: tailing the log and losing a number are made of
    them. A stream or a listing takes as long as its first item; later ones also wait for their reader.
    """

    def __init__(self, objects: Objects, metrics: SyncerMetrics, clock: Clock) -> None:
        """Measures by `clock`. Every counter of failures begins at 0, so that the first failure is an increase."""
        for operation in _OPERATIONS:
            for failure in _FAILURES:
                metrics.store_errors.labels(operation, failure.reason)
        self._objects = objects
        self._metrics = metrics
        self._clock = clock

    async def create(self, name: str, data: bytes) -> None:
        """Puts an object that must not exist."""
        with self._timed("create"):
            await self._objects.create(name, data)

    async def get(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        """Returns the object's bytes."""
        with self._timed("get"):
            return await self._objects.get(name, offset=offset, length=length)

    async def write(self, name: str, chunks: Chunks) -> int:
        """Puts a blob."""
        with self._timed("write"):
            return await self._objects.write(name, chunks)

    async def stream(self, name: str, *, offset: int = 0) -> AsyncIterator[bytes]:
        """Yields the object's bytes."""
        async for piece in self._each("stream", self._objects.stream(name, offset=offset)):
            yield piece

    async def folders(self, prefix: str) -> list[str]:
        """Returns the folders below `prefix`."""
        with self._timed("folders"):
            return await self._objects.folders(prefix)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Yields every object below `prefix`."""
        async for info in self._each("list", self._objects.list(prefix)):
            yield info

    async def delete(self, names: Sequence[str]) -> None:
        """Deletes these objects."""
        with self._timed("delete"):
            await self._objects.delete(names)

    async def sync_parent(self, *names: str) -> None:
        """Makes a name survive a power cut."""
        with self._timed("sync_parent"):
            await self._objects.sync_parent(*names)

    async def _each(self, operation: str, items: AsyncIterator[T]) -> AsyncIterator[T]:
        with self._timed(operation):
            item = await anext(items, _END)
        while item is not _END:
            yield item  # type: ignore[misc]  # the end is no item
            with self._counted(operation):
                item = await anext(items, _END)

    @contextmanager
    def _timed(self, operation: str) -> Iterator[None]:
        began_s = self._clock.monotonic_s()
        try:
            with self._counted(operation):
                yield
        finally:
            self._metrics.store_calls.labels(operation).observe(self._clock.monotonic_s() - began_s)

    @contextmanager
    def _counted(self, operation: str) -> Iterator[None]:
        try:
            yield
        except _FAILURES as error:
            self._metrics.store_errors.labels(operation, error.reason).inc()
            raise
