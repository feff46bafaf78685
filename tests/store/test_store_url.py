"""A store URL that can't be used says what to do, before anything is done."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from skerry.runtime.identifiers import SystemEntropy
from skerry.runtime.workers import Arguments, InlineWorkers, Result
from skerry.store.errors import StoreUnavailableError, StoreURLError
from skerry.store.objects.interface import ObjectInfo, Objects
from skerry.store.objects.local import LocalObjects
from skerry.store.objects.opening import open_objects


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("/var/lib/skerry", "did you mean file:///var/lib/skerry"),
        ("", "no scheme"),
        ("gs://bucket/prefix", "use file:///"),
        ("s3:///prefix", "needs a bucket"),
        ("file:///", "names no folder"),
        ("file://", "names no folder"),
    ],
)
def test_a_url_that_cannot_be_a_store_says_what_would(url: str, advice: str) -> None:
    with pytest.raises(StoreURLError, match=advice):
        open_objects(url)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreURLError, match=str(tmp_path / "file")):
        open_objects(f"file://{tmp_path}/file/store")
    with pytest.raises(StoreURLError, match=str(tmp_path / "file")):
        open_objects(f"file://{tmp_path}/file")


async def test_a_relative_folder_is_taken_from_where_the_process_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    objects = open_objects("file://data/store")
    await objects.create("a", b"x")
    assert (tmp_path / "data/store/a").read_bytes() == b"x"


async def test_a_path_with_blanks_is_a_path(tmp_path: Path) -> None:
    objects = open_objects(f"file://{tmp_path}/my%20store")
    await objects.create("a", b"x")
    assert (tmp_path / "my store/a").read_bytes() == b"x"


async def test_a_bucket_that_is_not_there_is_unavailable_not_empty(s3_options: dict[str, str]) -> None:
    objects = open_objects("s3://no-such-bucket-here/x", options=s3_options)
    with pytest.raises(StoreUnavailableError):
        await objects.create("a", b"x")


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    options = {"endpoint": "http://127.0.0.1:9", "region": "x", "access_key_id": "x", "secret_access_key": "x"}
    objects = open_objects("s3://bucket/x", options=options)
    with pytest.raises(StoreUnavailableError):
        await objects.get("a")


def test_a_folder_that_is_not_there_becomes_a_store_and_stays_one(tmp_path: Path) -> None:
    for _ in range(2):
        open_objects(f"file://{tmp_path}/mount/store", new=True)
        assert (tmp_path / "mount" / "store" / "skerry.store").read_bytes() == b'{"format":1}'
    open_objects(f"file://{tmp_path}/mount/store", new=False)


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("folder", ["mount", "mount/store", "mount/runs", "mount/of/a/store"])
def test_without_a_marker_a_store_is_begun_only_if_asked_for(tmp_path: Path, folder: str, writes: bool) -> None:
    """Its volume may not be mounted: `mount` is the mount point, and the store is that or a folder below."""
    (tmp_path / "mount" / "runs").mkdir(parents=True)
    with pytest.raises(StoreURLError, match=r"there is no store.*volume mounted.*--new-store"):
        open_objects(f"file://{tmp_path}/{folder}", new=False, writes=writes)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")} == {"mount", "mount/runs"}
    open_objects(f"file://{tmp_path}/{folder}", new=True)
    open_objects(f"file://{tmp_path}/{folder}", new=False, writes=writes)


async def test_while_its_marker_is_missing_a_store_says_nothing_and_takes_nothing(tmp_path: Path) -> None:
    objects = open_objects(f"file://{tmp_path}/store")
    await objects.create("runs/a", b"a")
    (tmp_path / "store").rename(tmp_path / "away")
    (tmp_path / "store").mkdir()
    with pytest.raises(StoreUnavailableError, match="volume mounted"):
        await objects.get("runs/a")
    with pytest.raises(StoreUnavailableError, match="volume mounted"):
        await objects.create("runs/b", b"b")
    with pytest.raises(StoreUnavailableError, match="volume mounted"):
        await objects.folders("runs")
    assert not list((tmp_path / "store").iterdir())


class _ReturningWorkers(InlineWorkers):
    """Workers before whose job `number` the volume is back: what was asked until then met an empty mount point."""

    def __init__(self, root: Path, number: int) -> None:
        self._root = root
        self._jobs_until = number

    async def run(self, function: Callable[[*Arguments], Result], *args: *Arguments) -> Result:
        self._jobs_until -= 1
        if self._jobs_until == 0:
            self._root.rmdir()
            self._root.with_name("away").rename(self._root)
        return await super().run(function, *args)


@pytest.mark.parametrize("job", [1, 2])
@pytest.mark.parametrize(
    "read",
    [
        lambda objects: objects.get("runs/a/1"),
        lambda objects: objects.get("runs/a/1", offset=1, length=1),
        lambda objects: _joined(objects.stream("runs/a/1")),
        lambda objects: objects.folders("runs"),
        lambda objects: objects.folders(""),
        lambda objects: _listed(objects.list("runs")),
        lambda objects: _listed(objects.list("")),
    ],
)
async def test_nothing_is_missing_because_its_volume_was_away_for_a_moment(
    tmp_path: Path, read: Callable[[Objects], Awaitable[object]], job: int
) -> None:
    root = tmp_path / "store"
    written = open_objects(f"file://{root}")
    await written.create("runs/a/1", b"one")
    await written.create("runs/b/2", b"two")
    content = await read(written)
    objects = LocalObjects(root, workers=_ReturningWorkers(root, job), entropy=SystemEntropy(), is_marked=True)
    root.rename(tmp_path / "away")
    root.mkdir()
    with contextlib.suppress(StoreUnavailableError):
        assert await read(objects) == content


async def _joined(pieces: AsyncIterator[bytes]) -> bytes:
    return b"".join([piece async for piece in pieces])


async def _listed(infos: AsyncIterator[ObjectInfo]) -> set[tuple[str, int]]:
    return {(info.name, info.size_bytes) async for info in infos}
