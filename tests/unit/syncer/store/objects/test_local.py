"""A folder store that loses power at any step: what was acknowledged is there, whole, and nothing is ever torn.

The model of a disk: a file's bytes survive if the file was synced after they were written, and a name survives if its
folder was synced after the name was made. What was not synced may survive or not, so both are tried.
"""

import asyncio
import contextlib
import errno
import os
import random
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from skerry.runtime.clock import SystemClock
from skerry.runtime.workers import Arguments, InlineWorkers, Result
from skerry.wire.layout import FragmentLayout, TensorSpec
from skerry_syncer.store.errors import (
    ObjectMissingError,
    StoreFullError,
    StoreUnavailableError,
)
from skerry_syncer.store.log.entries import (
    AcceptedItem,
    ObjectRef,
    RunSpec,
    RunStatus,
    SessionItem,
    SnapshotItem,
    StatusItem,
)
from skerry_syncer.store.objects.local import TEMPORARY, FileSystem, LocalObjects
from skerry_syncer.store.objects.opening import open_objects
from skerry_syncer.store.store import Store
from skerry_syncer.store.versions.blobs import StoredPart
from skerry_syncer.store.versions.run import Run
from tests.support.seeded_entropy import SeededEntropy

ENTRY = "runs/run/uid/log/00000000000000000001"
CONTENT = b"an entry of the log"
SESSION, DELTA, DIGEST = "a" * 32, "b" * 32, "0" * 64
RUN = RunSpec("run", "c" * 32, (FragmentLayout("body", (TensorSpec("weight", (4,)),)),), {"weight": "float32"}, 0.0)


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

    def survivors(self, *, unsynced_names_survive: bool) -> dict[str, bytes]:
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


async def put(objects: LocalObjects, way: str) -> None:
    if way == "create":
        await objects.create(ENTRY, CONTENT)
        return

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(CONTENT), 5):
            yield CONTENT[start : start + 5]

    await objects.write(ENTRY, pieces())


def cut_points() -> Iterator[int]:
    yield from range(40)


@pytest.mark.parametrize("way", ["create", "write"])
async def test_a_cut_at_any_step_leaves_the_whole_object_or_none(tmp_path: Path, way: str) -> None:
    acknowledged_count = 0
    for cut_at in cut_points():
        root = tmp_path / f"{way}-{cut_at}"
        root.mkdir()
        file_system = CuttableFileSystem(root, cut_at)
        is_acknowledged = True
        try:
            await put(opened(root, file_system), way)
        except PowerCutError:
            is_acknowledged = False
        for unsynced_names_survive in (False, True):
            left = file_system.survivors(unsynced_names_survive=unsynced_names_survive)
            assert left in ([{ENTRY: CONTENT}] if is_acknowledged else [{}, {ENTRY: CONTENT}]), f"cut at {cut_at}"
        acknowledged_count += is_acknowledged
    assert 0 < acknowledged_count < 40, "some cuts fell inside, some after the end"


async def test_what_another_process_published_survives_once_it_was_met(tmp_path: Path) -> None:
    for cut_at in cut_points():
        root = tmp_path / str(cut_at)
        root.mkdir()
        writer = CuttableFileSystem(root, cut_at)
        try:
            await put(opened(root, writer), "create")
        except PowerCutError:
            reader_files = CuttableFileSystem(root)
            reader_files.synced_bytes = writer.synced_bytes
            reader = opened(root, reader_files, seed=1)
            try:
                assert await reader.get(ENTRY) == CONTENT
            except ObjectMissingError:
                continue
            await reader.sync_parent(ENTRY)
            assert reader_files.survivors(unsynced_names_survive=False) == {ENTRY: CONTENT}


def store_on(disk: CuttableFileSystem, writer: str, seed: int) -> Store:
    """Returns what a new process has of a store on the disk."""
    entropy = SeededEntropy(random.Random(seed))
    objects = LocalObjects(disk.root, workers=InlineWorkers(), entropy=entropy, file_system=disk)
    return Store(objects, clock=SystemClock(), entropy=entropy, workers=InlineWorkers(), writer=writer)


async def opened_run(store: Store) -> Run:
    """Returns a new run with a learner in it."""
    run = await store.create_draft(RUN)
    initial = ObjectRef("snapshots/body/0", 0, 4, 10, "0" * 64)
    snapshot = SnapshotItem("body", 0, DIGEST, (initial,), ())
    await run.log.append([snapshot, StatusItem(RunStatus.OPEN), SessionItem("learner", SESSION, "")])
    return run


async def write_part(run: Run) -> StoredPart:
    return await run.blobs.write_part("body", DELTA, 0, 4, DIGEST, [1.0], [b"frames"])


def accepted(part: StoredPart) -> AcceptedItem:
    return AcceptedItem(
        delta=DELTA,
        fragment="body",
        learner="learner",
        session=SESSION,
        base_version=0,
        base_digest=DIGEST,
        digest=DIGEST,
        parts=(part.ref,),
        step_count=24,
        token_count=100,
        last_step=24,
        squared_norms=(1.0,),
    )


async def test_a_part_that_an_entry_names_survives_though_its_writer_was_killed(tmp_path: Path) -> None:
    """A process is killed at any step of a part, and the next one accepts the delta: then the power goes."""
    listed_count = 0
    for kill_at in cut_points():
        disk = CuttableFileSystem(tmp_path / str(kill_at))
        disk.root.mkdir()
        run = await opened_run(store_on(disk, "first", seed=0))
        disk.cut_at = disk.step_count + kill_at
        with contextlib.suppress(PowerCutError):
            await write_part(run)
        disk.cut_at = None
        successor = await store_on(disk, "second", seed=1).open_run(RUN.name, RUN.uid)
        listed = await successor.blobs.list_parts("body", DELTA)
        listed_count += len(listed)
        part = listed[0] if listed else await write_part(successor)
        (outcome,) = await successor.log.append([accepted(part)])
        assert outcome.rejection is None
        left = disk.survivors(unsynced_names_survive=False)
        assert f"{successor.log.prefix}/{part.ref.name}" in left, f"an entry names a lost part. killed at {kill_at}"
    assert 0 < listed_count < 40, "some parts were listed, some were not published"


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
    assert files.survivors(unsynced_names_survive=False) == {"deltas/p/d/3": b"x"}


@pytest.mark.parametrize("way", ["get", "list", "folders", "stream"])
async def test_a_store_that_fails_to_open_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Whoever follows the store goes on after an error of the store, and ends with any other one."""
    objects = opened(tmp_path, FileSystem())
    await objects.create(ENTRY, CONTENT)

    def fail(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("skerry_syncer.store.objects.local.os.open", fail)
    begun = getattr(objects, way)(ENTRY)
    with pytest.raises(StoreUnavailableError, match="Too many open files"):
        await (begun if way in {"get", "folders"} else anext(begun))


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
    await put(opened(tmp_path, FileSystem()), "create")
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


async def test_a_linked_folder_is_listed(tmp_path: Path) -> None:
    objects = opened(tmp_path, FileSystem())
    await objects.create("elsewhere/run/uid/x", CONTENT)
    (tmp_path / "runs").symlink_to("elsewhere")
    assert await objects.folders("runs") == ["run"]
    assert [one.name async for one in objects.list("runs")] == ["runs/run/uid/x"]


class FullFileSystem(FileSystem):
    """A disk that has no room for content."""

    def write(self, descriptor: int, data: bytes | memoryview) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


class BrokenFileSystem(FileSystem):
    """A disk that fails to sync."""

    def sync_file(self, descriptor: int, path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize(
    ("file_system", "error"), [(FullFileSystem(), StoreFullError), (BrokenFileSystem(), StoreUnavailableError)]
)
async def test_a_disk_that_fails_leaves_nothing_and_says_what_is_wrong(
    tmp_path: Path, file_system: FileSystem, error: type[Exception]
) -> None:
    with pytest.raises(error, match=ENTRY):
        await opened(tmp_path, file_system).create(ENTRY, CONTENT)
    assert files_below(tmp_path) == []


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
    with pytest.raises(StoreUnavailableError, match="volume mounted"):
        await objects.create(ENTRY, CONTENT)
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
