"""Disposable float32 arrays as large as a fragment, in memory or in memory-mapped files that end with the process.

Outer state may exceed a host's memory. What is beyond a share of it lies in files that the kernel pages in and out; not
all of it does, because the kernel writes every page of a mapped file back to its disk, again and again. The files have
no names, so a crash leaves none behind. Where the disk has no space for another, the caches that were used least
recently go.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Protocol
from weakref import WeakSet, WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from skerry.runtime.logs import get_logger
from skerry_syncer.store.errors import StoreFullError

# Merges of several fragments overlap, each with a sum.
_MOST_SPARE: Final = 8
# Smaller arrays stay in memory, where they cost less than a file; a simulation makes thousands of them.
SMALLEST_FILE_BYTES: Final = 2**20

_LOG: Final = get_logger(__name__)


class Cached(Protocol):
    """Arrays that their owner keeps for later use and can make again."""

    def let_go(self) -> None:
        """Drops the arrays."""


# Of the memory that the process may use.
_MEMORY_SHARE: Final = 0.25
_LIMIT_FILES: Final = {"": "{}/memory.max", "memory": "memory/{}/memory.limit_in_bytes"}


def memory_share_bytes(proc: Path = Path("/proc/self/cgroup"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns how much memory a process should give to scratch: a quarter of the machine's, or of its control group's.

    A limit of any group above counts, in version 1 and 2 of control groups; as in a container, which sees its own group
    as the root.
    """
    limits = [os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE]
    with contextlib.suppress(OSError):
        for line in proc.read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            file = _LIMIT_FILES.get(controllers, "{}")
            for group in (Path(name), *Path(name).parents):
                with contextlib.suppress(OSError, ValueError):  # version 2 writes "max" where there is no limit
                    limits.append(int(Path(f"{cgroups}/{file.format(str(group).strip('/'))}").read_text()))
    return int(_MEMORY_SHARE * min(limits))


class Scratch:
    """Gives zeroed arrays: in memory, and beyond a bound in files of one directory, if there is one."""

    def __init__(self, directory: Path | None, *, memory_bytes: int = 0) -> None:
        """Takes an existing directory, best on a local disk; None keeps everything in memory."""
        self._directory = directory
        self._memory_bytes = memory_bytes  # of all arrays in memory, but for small ones
        self._in_memory: WeakSet[mmap.mmap] = WeakSet()
        self._spare: list[NDArray[np.float32]] = []  # that were lent before
        self._cached: WeakValueDictionary[int, Cached] = WeakValueDictionary()  # the least recently used first
        self._use_count = itertools.count()

    def may_drop(self, cached: Cached) -> None:
        """Has `cached` let go when space is needed, after all that were named earlier and still exist."""
        self._cached[next(self._use_count)] = cached

    def zeros(self, count: int, numel: int) -> tuple[NDArray[np.float32], ...]:
        """Returns `count` arrays of shape (numel,), each of which frees its memory or file when it is dropped.

        The disk blocks are reserved here, because a process dies when a mapped file runs out of disk later.

        Raises:
            StoreFullError: the directory has no space for them, with every cache gone.
        """
        return tuple(self._zeros(numel) for _ in range(count))

    def _zeros(self, numel: int) -> NDArray[np.float32]:
        if self._directory is None or 4 * numel < SMALLEST_FILE_BYTES:
            return np.zeros(numel, np.float32)
        return np.frombuffer(self._mapped(self._directory, 4 * numel), np.float32)

    @contextlib.contextmanager
    def lent(self, numel: int) -> Iterator[NDArray[np.float32]]:
        """Yields an array of shape (numel,) and any content, which must not be used afterwards.

        Its memory is used again, because the kernel takes as long to clear fresh memory as a pass of arithmetic does.

        Raises:
            StoreFullError: as `zeros`.
        """
        fitting = [array for array in self._spare if numel <= len(array) <= 2 * numel]
        array = min(fitting, key=len) if fitting else self._zeros(numel)
        self._spare = [spare for spare in self._spare if spare is not array]
        yield array[:numel]
        self._spare = [*self._spare, array][-_MOST_SPARE:]

    def _mapped(self, directory: Path, size_bytes: int) -> mmap.mmap:
        mapped = self._mapped_memory(size_bytes)
        if mapped is not None:
            return mapped
        if self._spare:
            self._spare.clear()
            return self._mapped(directory, size_bytes)
        try:
            return _map_unnamed_file(directory, size_bytes)
        except StoreFullError as error:
            oldest = next(iter(self._cached.items()), None)
            if oldest is None:
                raise
            _LOG.warning("scratch is full, a cached fragment goes and will be rebuilt", cause=str(error))
            self._cached.pop(oldest[0], None)
            oldest[1].let_go()
        return self._mapped(directory, size_bytes)

    def _mapped_memory(self, size_bytes: int) -> mmap.mmap | None:
        """Returns memory, if there is some left for it."""
        if sum(map(len, self._in_memory)) + size_bytes > self._memory_bytes:
            return None
        try:
            mapped = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError:  # a limit of the process
            return None
        with contextlib.suppress(OSError, AttributeError):  # neither macOS nor every kernel has huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
        self._in_memory.add(mapped)
        return mapped


def _map_unnamed_file(directory: Path, size_bytes: int) -> mmap.mmap:
    with tempfile.TemporaryFile(dir=directory, prefix="skerry-scratch-") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise StoreFullError(
                f"no space for scratch files. directory={directory}, size_bytes={size_bytes}"
            ) from error
        return mmap.mmap(file.fileno(), size_bytes)
