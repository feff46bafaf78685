"""Scratch arrays: zeroed, separate, and gone when they are dropped."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from skerry_syncer.store.errors import StoreFullError
from skerry_syncer.store.versions import scratch as scratch_module
from skerry_syncer.store.versions.scratch import SMALLEST_FILE_BYTES, Scratch, memory_share_bytes

NUMEL = SMALLEST_FILE_BYTES // 4 + 3


@pytest.mark.parametrize("numel", [0, 1, NUMEL])
def test_arrays_begin_as_zeros_and_share_nothing(tmp_path: Path, numel: int) -> None:
    arrays = Scratch(tmp_path).zeros(3, numel)
    for value, array in enumerate(arrays, 1):
        assert array.shape == (numel,)
        assert array.dtype == np.float32
        assert not array.any()
        array[:] = value
    for value, array in enumerate(arrays, 1):
        assert (array == value).all()


def test_files_have_no_names_so_that_a_crash_leaves_nothing(tmp_path: Path) -> None:
    arrays = Scratch(tmp_path).zeros(2, NUMEL)
    arrays[0][:] = 1
    assert list(tmp_path.iterdir()) == []


def test_a_file_lives_as_long_as_its_array(tmp_path: Path) -> None:
    def mapped_count() -> int:
        return Path("/proc/self/maps").read_text().count(str(tmp_path))

    first, second = Scratch(tmp_path).zeros(2, NUMEL)
    assert mapped_count() == 2
    del first
    second[-1] = 5
    assert (second[-1], mapped_count()) == (5, 1)


def test_files_are_for_what_memory_has_no_share_left_for(tmp_path: Path) -> None:
    def is_in_file(array: NDArray[np.float32]) -> bool:
        address = array.ctypes.data
        for line in Path("/proc/self/maps").read_text().splitlines():
            low, high = (int(edge, 16) for edge in line.split()[0].split("-"))
            if low <= address < high:
                return str(tmp_path) in line
        raise AssertionError("array is mapped nowhere")

    scratch = Scratch(tmp_path, memory_bytes=2 * SMALLEST_FILE_BYTES)
    first, second = (scratch.zeros(1, NUMEL)[0] for _ in range(2))
    assert [is_in_file(first), is_in_file(second)] == [False, True]
    first[:] = 1
    del first
    (third,) = scratch.zeros(1, NUMEL)
    assert not is_in_file(third)
    assert not third.any()


def test_a_share_of_memory_is_less_than_the_machine_has() -> None:
    assert 0 < memory_share_bytes() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4


@pytest.mark.parametrize(
    ("group", "limits"),
    [
        ("0::/app.slice/syncer", {"app.slice/syncer/memory.max": "max", "app.slice/memory.max": "1048576"}),
        ("0::/", {"memory.max": "1048576"}),
        ("0::/outside/of/the/container", {"memory.max": "1048576"}),
        ("3:cpu:/x\n4:memory:/pod/a", {"memory/pod/a/memory.limit_in_bytes": "1048576", "cpu/x/memory.max": "8"}),
    ],
)
def test_the_tightest_limit_of_the_control_groups_counts(tmp_path: Path, group: str, limits: dict[str, str]) -> None:
    (tmp_path / "self").write_text(group)
    for name, limit in limits.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(limit)
    assert memory_share_bytes(tmp_path / "self", tmp_path) == 2**18


def test_memory_is_asked_again_once_a_cache_has_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: object) -> None:
        raise StoreFullError("no space")

    monkeypatch.setattr(scratch_module, "_map_unnamed_file", no_space)
    scratch = Scratch(tmp_path, memory_bytes=2 * SMALLEST_FILE_BYTES)

    class Cache:
        arrays = scratch.zeros(1, NUMEL)

        def let_go(self) -> None:
            self.arrays = Cache.arrays = ()

    cache = Cache()
    scratch.may_drop(cache)
    assert len(scratch.zeros(1, NUMEL)) == 1
    assert cache.arrays == ()


def test_a_process_that_may_not_have_memory_takes_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = mmap.mmap

    def refused(handle: int, *given: object, **more: object) -> mmap.mmap:
        if handle == -1:
            raise OSError(errno.ENOMEM, "no memory")
        return real(handle, *given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(mmap, "mmap", refused)
    (array,) = Scratch(tmp_path, memory_bytes=2**30).zeros(1, NUMEL)
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    array[:] = 1


def test_no_space_is_said_at_once_instead_of_killing_the_process_later(tmp_path: Path) -> None:
    free_bytes = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    with pytest.raises(StoreFullError, match="no space"):
        Scratch(tmp_path).zeros(1, free_bytes // 4 + 2**30)
