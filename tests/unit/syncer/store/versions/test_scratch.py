"""Scratch arrays: zeroed, separate, and gone when they are dropped."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from skerry_syncer.store.errors import StoreFullError
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


def test_files_without_names_are_for_what_memory_has_no_share_left_for(tmp_path: Path) -> None:
    def mapped_count() -> int:
        return Path("/proc/self/maps").read_text().count(str(tmp_path))

    scratch = Scratch(tmp_path, memory_bytes=2 * SMALLEST_FILE_BYTES)
    (first,) = scratch.zeros(1, NUMEL)
    assert mapped_count() == 0
    second, third = scratch.zeros(2, NUMEL)
    assert (mapped_count(), list(tmp_path.iterdir())) == (2, [])
    first[:] = 1
    del first, third
    (fourth,) = scratch.zeros(1, NUMEL)
    assert mapped_count() == 1, "memory that was given back is used again"
    assert not fourth.any()
    assert not second.any()


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


def test_no_space_is_said_at_once_instead_of_killing_the_process_later(tmp_path: Path) -> None:
    free_bytes = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    with pytest.raises(StoreFullError, match="no space"):
        Scratch(tmp_path).zeros(1, free_bytes // 4 + 2**30)


@dataclass(eq=False)
class Cache:
    """A cache that notes when it is let go."""

    name: str
    gone: list[str]

    def let_go(self) -> None:
        self.gone.append(self.name)


def test_where_the_disk_is_full_the_caches_used_longest_ago_go_and_no_more_than_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures, gone, allocate = [errno.ENOSPC, errno.EDQUOT], list[str](), os.posix_fallocate

    def fail_twice(*place: int) -> None:
        if failures:
            raise OSError(failures.pop(), "no space")
        allocate(*place)

    scratch, caches = Scratch(tmp_path), [Cache(name, gone) for name in ("first", "second", "third", "fourth")]
    for cache in caches:
        scratch.may_drop(cache)
    del caches[1], cache
    monkeypatch.setattr(os, "posix_fallocate", fail_twice)
    assert len(scratch.zeros(1, NUMEL)[0]) == NUMEL
    assert gone == ["first", "third"]
