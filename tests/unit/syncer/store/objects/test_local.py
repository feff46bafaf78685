"""A folder store that loses power at any step: what was acknowledged is there, whole, and nothing is ever torn.

The model of a disk: a file's bytes survive if the file was synced after they were written, and a name survives if its
folder was synced after the name was made. What was not synced may survive or not, so both are tried.
"""

import asyncio
import contextlib
import errno
import os
import random
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest

from skerry.runtime.workers import Arguments, InlineWorkers, Result
from skerry_syncer.store.errors import ObjectMissingError, StoreFullError, StoreUnavailableError
from skerry_syncer.store.objects.local import TEMPORARY, FileSystem, LocalObjects
from skerry_syncer.store.objects.opening import open_objects
from skerry_syncer.store.versions.run import Run
from tests.support.log_bench import SPEC, store_on
from tests.support.seeded_entropy import SeededEntropy

ENTRY = "runs/run/uid/log/00000000000000000001"
CONTENT = b"an entry of the log"
DELTA = "b" * 32
CUTS = range(40)  # steps before which the power is cut, or a process killed; more than anything here takes


class PowerCutError(Exception):
    """The machine is off."""


class CuttableFileSystem(FileSystem):
    """Does everything for real, remembers what is durable, and stops before step number `cut_at`."""

    def __init__(self, root: Path, cut_at: int | None = None) -> None:
        self.cut_at = cut_at
        self.step_count = 0
        self.synced_bytes: dict[int, int] = {}  # by inode
        self.synced_names: set[Path] = {root}
        self.root = root
        root.mkdir(exist_ok=True)

    def step(self) -> None:
        if self.step_count == self.cut_at:
            raise PowerCutError
        self.step_count += 1

    def write(self, descriptor: int, data: bytes | memoryview) -> None:
        self.step()
        super().write(descriptor, data)

    def sync_file(self, descriptor: int, path: Path) -> None:
        self.step()
        super().sync_file(descriptor, path)
        self.synced_bytes[path.stat().st_ino] = path.stat().st_size

    def sync_folder(self, path: Path) -> None:
        self.step()
        super().sync_folder(path)
        self.synced_names.update(path.iterdir())

    def make_folder(self, path: Path) -> None:
        self.step()
        super().make_folder(path)

    def publish(self, source: Path, target: Path) -> None:
        self.step()
        super().publish(source, target)

    def survivors(self, *, unsynced_names_survive: bool = False) -> dict[str, bytes]:
        """Returns the objects after the power is back, without temporary ones."""

        def is_durable(path: Path) -> bool:
            return (
                unsynced_names_survive or path == self.root or (path in self.synced_names and is_durable(path.parent))
            )

        files = [path for path in files_below(self.root) if TEMPORARY not in path.parts]
        return {
            str(path.relative_to(self.root)): path.read_bytes()[: self.synced_bytes.get(path.stat().st_ino, 0)]
            for path in files
            if is_durable(path)
        }


def opened(root: Path, file_system: FileSystem, seed: int = 0, *, is_marked: bool = False) -> LocalObjects:
    entropy = SeededEntropy(random.Random(seed))
    return LocalObjects(root, workers=InlineWorkers(), entropy=entropy, file_system=file_system, is_marked=is_marked)


def files_below(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


async def put(objects: LocalObjects, way: str = "create") -> None:
    if way == "create":
        await objects.create(ENTRY, CONTENT)
        return

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(CONTENT), 5):
            yield CONTENT[start : start + 5]

    await objects.write(ENTRY, pieces())


@pytest.mark.parametrize("way", ["create", "write"])
async def test_a_cut_at_any_step_leaves_the_whole_object_or_none(tmp_path: Path, way: str) -> None:
    acknowledged_count = 0
    for cut_at in CUTS:
        file_system = CuttableFileSystem(tmp_path / str(cut_at), cut_at)
        is_acknowledged = True
        try:
            await put(opened(file_system.root, file_system), way)
        except PowerCutError:
            is_acknowledged = False
        for unsynced_names_survive in (False, True):
            left = file_system.survivors(unsynced_names_survive=unsynced_names_survive)
            assert left in ([{ENTRY: CONTENT}] if is_acknowledged else [{}, {ENTRY: CONTENT}]), f"cut at {cut_at}"
        acknowledged_count += is_acknowledged
    assert 0 < acknowledged_count < len(CUTS), "some cuts fell inside, some after the end"


async def test_what_another_process_published_survives_once_it_was_met(tmp_path: Path) -> None:
    met_count = 0
    for cut_at in CUTS:
        disk = CuttableFileSystem(tmp_path / str(cut_at), cut_at)
        with contextlib.suppress(PowerCutError):
            await put(opened(disk.root, disk))
        disk.cut_at = None
        reader = opened(disk.root, disk, seed=1)
        with contextlib.suppress(ObjectMissingError):
            assert await reader.get(ENTRY) == CONTENT
            await reader.sync_parent(ENTRY)
            assert disk.survivors() == {ENTRY: CONTENT}
            met_count += 1
    assert 0 < met_count < len(CUTS)


async def new_process(disk: CuttableFileSystem, seed: int) -> Run:
    """Returns a run as a new process opens it."""
    entropy = SeededEntropy(random.Random(seed))
    return await store_on(opened(disk.root, disk, seed), entropy=entropy).create_draft(SPEC)


async def test_a_part_that_is_listed_survives_though_its_writer_was_killed(tmp_path: Path) -> None:
    """A process is killed at any step of a part. What the next one lists, an entry may name: then the power goes."""
    listed_count = 0
    for kill_at in CUTS:
        disk = CuttableFileSystem(tmp_path / str(kill_at))
        first = await new_process(disk, seed=0)
        disk.cut_at = disk.step_count + kill_at
        with contextlib.suppress(PowerCutError):
            await first.blobs.write_part("body", DELTA, 0, 4, "0" * 64, [1.0], [b"frames"])
        disk.cut_at = None
        second = await new_process(disk, seed=1)
        for part in await second.blobs.list_parts("body", DELTA):
            assert f"{second.log.prefix}/{part.ref.name}" in disk.survivors(), f"killed at {kill_at}"
            listed_count += 1
    assert 0 < listed_count < len(CUTS), "some parts were listed, some were not published"


async def test_folders_are_synced_once_and_again_when_they_were_made_anew(tmp_path: Path) -> None:
    files = CuttableFileSystem(tmp_path)
    objects = opened(tmp_path, files)
    await objects.create("deltas/p/d/1", b"x")
    first = files.step_count
    await objects.create("deltas/p/d/2", b"x")
    assert files.step_count - first < first
    await objects.delete(["deltas/p/d/1", "deltas/p/d/2"])
    assert not (tmp_path / "deltas/p/d").exists()
    await objects.create("deltas/p/d/3", b"x")
    assert files.survivors() == {"deltas/p/d/3": b"x"}


def fail(monkeypatch: pytest.MonkeyPatch, call: str, code: int) -> None:
    """Has a call of the operating system fail from now on."""

    def failing(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, failing)


@pytest.mark.parametrize("way", ["get", "list", "folders", "stream"])
async def test_a_store_that_fails_to_open_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Whoever follows the store goes on after an error of the store, and ends with any other one."""
    objects = opened(tmp_path, FileSystem())
    await put(objects)
    fail(monkeypatch, "open", errno.EMFILE)
    begun = getattr(objects, way)(ENTRY)
    with pytest.raises(StoreUnavailableError, match="Too many open files"):
        await (begun if way in {"get", "folders"} else anext(begun))


@pytest.mark.parametrize(
    ("call", "code", "error"),
    [("write", errno.ENOSPC, StoreFullError), ("fsync", errno.EIO, StoreUnavailableError)],
)
async def test_a_disk_that_fails_leaves_nothing_and_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int, error: type[Exception]
) -> None:
    fail(monkeypatch, call, code)
    with pytest.raises(error, match=ENTRY):
        await put(opened(tmp_path, FileSystem()))
    assert files_below(tmp_path) == []


class _HeldWorkers(InlineWorkers):
    """Workers whose thread is at its second job, after the one that opens a file, when its caller is cancelled."""

    def __init__(self) -> None:
        self._job_count = 0
        self.held: Callable[[], object] | None = None

    async def run(self, function: Callable[[*Arguments], Result], *args: *Arguments) -> Result:
        self._job_count += 1
        if self._job_count == 2:
            self.held = partial(function, *args)
            await asyncio.get_running_loop().create_future()
        return await super().run(function, *args)


@pytest.mark.parametrize("way", ["stream", "write"])
async def test_a_file_stays_open_while_a_thread_uses_it_though_its_caller_is_cancelled(
    tmp_path: Path, way: str
) -> None:
    await put(opened(tmp_path, FileSystem()))
    workers = _HeldWorkers()
    objects = LocalObjects(tmp_path, workers=workers, entropy=SeededEntropy(random.Random(1)))

    async def call() -> None:
        if way == "write":
            await put(objects, way)
        async for _ in objects.stream(ENTRY):
            pass

    task = asyncio.ensure_future(call())
    while workers.held is None:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    del task
    assert workers.held() == (CONTENT if way == "stream" else None)


class UnmountedFileSystem(FileSystem):
    """A volume that is unmounted while an object is being written."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def sync_file(self, descriptor: int, path: Path) -> None:
        self._root.rename(self._root.with_name("away"))
        self._root.mkdir()
        super().sync_file(descriptor, path)


async def test_a_volume_that_is_unmounted_during_a_write_leaves_its_mount_point_empty(tmp_path: Path) -> None:
    root = tmp_path / "store"
    root.mkdir()
    opened(root, FileSystem()).mark()
    objects = opened(root, UnmountedFileSystem(root), is_marked=True)
    for _ in range(2):  # while it is unmounted, and afterwards
        with pytest.raises(StoreUnavailableError, match="volume mounted"):
            await put(objects)
    assert list(root.iterdir()) == []


async def test_nobody_else_can_read_a_store(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        objects = open_objects(f"file://{tmp_path}/store", reserve=True)
        await objects.create("runs/a/log", b"x")
        await objects.write("runs/a/blob", b"x")
    finally:
        os.umask(old)
    root = tmp_path / "store"
    assert [path for path in (root, *root.rglob("*")) if path.stat().st_mode & 0o077] == []
