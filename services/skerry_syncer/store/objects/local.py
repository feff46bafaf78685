"""Objects in a folder of this machine that survive a power cut once they were acknowledged.

A new object is written under a temporary name and synced. It then gets its own name, in one step that fails if the
name is taken, and its folder is synced; only then is it acknowledged. New folders are synced into their parents first.
`obstore` does not sync the files that it writes: after a power cut they would be empty log entries that block their
numbers; and a small read through it takes four switches of threads. So it is for other stores.

The name is given by `link(2)`, which is atomic, fails if the name exists, and works on more than Linux. `temporary/`
has the files that have no name yet; what a crash leaves there is litter that `gc` deletes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Final

from skerry.runtime.identifiers import Entropy
from skerry.runtime.workers import Workers
from skerry_syncer.store.errors import StoreFullError, StoreUnavailableError
from skerry_syncer.store.objects.buckets import translated_errors
from skerry_syncer.store.objects.interface import STREAM_CHUNK_BYTES, Chunks, ObjectInfo, check_object_name

TEMPORARY: Final = "temporary"
MARKER: Final = "skerry.store"  # says that a folder is a store: without it, its volume is not mounted
# A file that holds space for log entries, because a collection on a full disk begins with an entry. It is given up in
# pieces, each larger than the entry that condemns a thousand objects.
RESERVE: Final = "reserve"
_RESERVE_BYTES: Final = 2**24
_RESERVE_PIECE_BYTES: Final = 2**18
# Only the owner may read a model: all processes of a `file://` store run as one user.
FOLDER_MODE: Final = 0o700
_FILE_MODE: Final = 0o600
_NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
# A collection may remove a new folder before the file is published into it. Then the folder is made again.
_PUBLISH_ATTEMPTS: Final = 3
_REMEMBERED: Final = 10_000  # folders, a few MB. What was forgotten is synced once more


class FileSystem:
    """The system calls that durability depends on, in one place so that a test can record them and cut the power."""

    def write(self, descriptor: int, data: bytes | memoryview) -> None:
        """Writes all of `data`."""
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]

    def sync_file(self, descriptor: int, path: Path) -> None:
        """Makes the file's content durable."""
        os.fsync(descriptor)

    def sync_folder(self, path: Path) -> None:
        """Makes the folder's names durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def make_folder(self, path: Path) -> None:
        """Makes one folder, if it does not exist."""
        path.mkdir(FOLDER_MODE, exist_ok=True)

    def publish(self, source: Path, target: Path) -> None:
        """Gives the file a second name; raises FileExistsError if the name is taken."""
        os.link(source, target)


class LocalObjects:
    """Objects below the folder `root`, which exists."""

    def __init__(
        self,
        root: Path,
        *,
        workers: Workers,
        readers: Workers | None = None,
        entropy: Entropy,
        file_system: FileSystem | None = None,
        is_marked: bool = False,
    ) -> None:
        """A folder that `is_marked` is unavailable while its marker is not there. `readers` sync nothing."""
        self._is_marked = is_marked
        self._has_reserve = False
        self.root = root
        self._workers = workers
        self._readers = readers or workers
        self._entropy = entropy
        self._file_system = file_system or FileSystem()
        self._durable: dict[Path, int] = {}  # inode numbers of folders whose own names were synced by this process

    async def create(self, name: str, data: bytes) -> None:
        """Writes, syncs and publishes an object; on a full disk in the space of the reserve."""
        while True:
            try:
                await self.write(name, data)
                return
            except StoreFullError:
                if not await self._workers.run(self._shrink_reserve):
                    raise

    async def write(self, name: str, chunks: Chunks) -> None:
        """Writes a blob as it comes, syncs and publishes it."""
        with translated_errors("write", check_object_name(name)):
            if isinstance(chunks, AsyncIterator):
                await self._write_stream(name, chunks)
            else:
                await self._workers.run(self._put, name, *((chunks,) if isinstance(chunks, bytes) else chunks))

    async def _write_stream(self, name: str, chunks: AsyncIterator[bytes]) -> None:
        draft = await self._workers.run(self._begin)
        try:
            async for chunk in chunks:
                await self._workers.run(self._append, draft, chunk)
            await self._workers.run(self._publish, draft, name)
        finally:
            # The descriptor is not closed here: if this task was cancelled, a thread may still write to it.
            draft.path.unlink(missing_ok=True)

    async def get(self, name: str) -> bytes:
        """Returns the object's bytes."""
        with translated_errors("get", check_object_name(name)):
            return await self._readers.run(self._get, name)

    async def stream(self, name: str, *, offset: int = 0) -> AsyncIterator[bytes]:
        """Yields the object's bytes from `offset`; some twenty times as fast from the page cache as through obstore."""
        with translated_errors("stream", check_object_name(name)):
            file = await self._readers.run(self._open, name)
            while piece := await self._readers.run(file.read, offset):
                yield piece
                offset += len(piece)

    async def folders(self, prefix: str) -> list[str]:
        """Returns the folders directly below `prefix`."""
        with translated_errors("list", prefix):
            return await self._readers.run(lambda: next((sorted(each) for _, each, _, _ in self._walk(prefix)), []))

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Yields every object below `prefix`."""
        with translated_errors("list", prefix):
            for info in await self._readers.run(lambda: [*self._files(prefix)]):
                yield info

    async def delete(self, names: Sequence[str]) -> None:
        """Deletes these objects, and the folders that are empty then."""
        with translated_errors("delete", names[0] if names else ""):
            await self._workers.run(self._delete, [check_object_name(name) for name in names])

    async def sync_parent(self, *names: str) -> None:
        """Makes names in one folder durable."""
        with translated_errors("sync", check_object_name(names[-1])):
            await self._workers.run(self._sync_folder, (self.root / names[-1]).parent)

    def mark(self) -> None:
        """Makes the folder a store for good; blocks. Idempotent."""
        with contextlib.suppress(FileExistsError):
            self._put(MARKER, b'{"format":1}')
        self._is_marked = True

    def fill_reserve(self) -> None:
        """Makes the reserve as large as there is space for, from now on after each deletion; blocks."""
        self._has_reserve = True
        with contextlib.suppress(OSError), open(self.root / RESERVE, "ab", opener=_open_private) as file:
            os.posix_fallocate(file.fileno(), 0, _RESERVE_BYTES)

    def _shrink_reserve(self) -> bool:
        """Frees a piece of the reserve; returns false if there is none left."""
        path = self.root / RESERVE
        try:
            size = path.stat().st_size
            os.truncate(path, max(0, size - _RESERVE_PIECE_BYTES))
        except OSError:
            return False
        return size > 0

    @contextlib.contextmanager
    def _opened_root(self) -> Iterator[int]:
        """Yields a descriptor of the store's folder, which stays valid wherever its volume is mounted by then.

        Raises:
            StoreUnavailableError: the store is not there, as with an unmounted volume: that says nothing about objects.
        """
        try:
            root = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise StoreUnavailableError(f"store's folder can't be opened. {error}. Is its volume mounted?") from error
        try:
            if self._is_marked and not os.access(MARKER, os.F_OK, dir_fd=root):
                raise StoreUnavailableError(
                    f"the store's folder has no {MARKER}. folder={self.root}. Is its volume mounted?"
                )
            yield root
        finally:
            os.close(root)

    def _get(self, name: str) -> bytes:
        file = self._open(name)
        with open(file.descriptor, "rb", closefd=False) as reader:
            return reader.read()

    def _open(self, name: str) -> _File:
        with self._opened_root() as root:
            return _File(Path(name), os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=root))

    def _files(self, prefix: str) -> Iterator[ObjectInfo]:
        for folder, _, names, descriptor in self._walk(prefix):
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # deleted a moment ago
                    status = os.stat(name, dir_fd=descriptor)
                    yield ObjectInfo(os.path.normpath(f"{folder}/{name}"), status.st_size, status.st_mtime)

    def _walk(self, prefix: str) -> Iterator[tuple[str, Sequence[str], Sequence[str], int]]:
        """Yields what `os.fwalk` does, of folders that are there."""
        with self._opened_root() as root, contextlib.suppress(FileNotFoundError):
            yield from os.fwalk(prefix or ".", onerror=_raise_unless_gone, follow_symlinks=True, dir_fd=root)

    def _put(self, name: str, *pieces: bytes | memoryview) -> None:
        draft = self._begin()
        try:
            for data in pieces:
                self._append(draft, data)
            self._publish(draft, name)
        finally:
            draft.path.unlink(missing_ok=True)

    def _begin(self) -> _File:
        with self._opened_root():
            path = self.root / TEMPORARY / self._entropy.hex_id()
            self._file_system.make_folder(path.parent)
            return _File(path, os.open(path, _NEW_FILE, _FILE_MODE))

    def _append(self, draft: _File, data: bytes | memoryview) -> None:
        """Takes the draft, so that its descriptor stays open until a thread has written to it."""
        self._file_system.write(draft.descriptor, data)

    def _publish(self, draft: _File, name: str) -> None:
        target = self.root / name
        self._file_system.sync_file(draft.descriptor, draft.path)
        for _ in range(_PUBLISH_ATTEMPTS):
            with contextlib.suppress(FileNotFoundError):
                self._make_durable(target.parent)
                self._file_system.publish(draft.path, target)
                self._file_system.sync_folder(target.parent)
                return
        raise StoreUnavailableError(f"the folder of the object was removed each time it was made. name={name}")

    def _make_durable(self, folder: Path) -> None:
        """Makes `folder` and its parents. This process syncs each of them into its parent at least once.

        A folder that exists is synced too, because the process that made it may not have done so yet.
        """
        if folder == self.root or (folder.is_dir() and self._durable.get(folder) == folder.stat().st_ino):
            return
        self._make_durable(folder.parent)
        with self._opened_root():  # the volume may be gone since the draft was begun
            self._file_system.make_folder(folder)
        self._file_system.sync_folder(folder.parent)
        if len(self._durable) >= _REMEMBERED:
            self._durable.clear()
        self._durable[folder] = folder.stat().st_ino

    def _sync_folder(self, folder: Path) -> None:
        self._make_durable(folder)
        self._file_system.sync_folder(folder)

    def _delete(self, names: Sequence[str]) -> None:
        for name in names:
            path = self.root / name
            path.unlink(missing_ok=True)
            if path.parent.name != TEMPORARY:
                with contextlib.suppress(OSError):  # not empty, or gone
                    path.parent.rmdir()
        if self._has_reserve:
            self.fill_reserve()


class _File:
    """An open file; closed when the last reference to it ends, so that no thread uses a descriptor of another file."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor

    def read(self, offset: int) -> bytes:
        """Returns the next bytes from `offset`; none at the end."""
        return os.pread(self.descriptor, STREAM_CHUNK_BYTES, offset)

    def __del__(self) -> None:
        os.close(self.descriptor)


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, _FILE_MODE)
