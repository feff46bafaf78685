"""A store URL that can't be used says what to do, before anything is done."""

import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from urllib.parse import unquote

import pytest

from skerry.runtime.identifiers import SystemEntropy
from skerry.runtime.workers import Arguments, InlineWorkers, Result
from skerry_syncer.store.errors import ObjectMissingError, StoreUnavailableError, StoreURLError
from skerry_syncer.store.objects.interface import ObjectInfo, Objects
from skerry_syncer.store.objects.local import LocalObjects
from skerry_syncer.store.objects.opening import open_objects, parse_url


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("/var/lib/skerry", "did you mean file:///var/lib/skerry"),
        ("", "no scheme"),
        ("gs://bucket/prefix", "use file:///"),
        ("s3:///prefix", "needs a bucket"),
        ("file:///", "names no folder"),
        ("file://", "names no folder"),
        ("file://localhost", "names no folder"),
        ("file:////", "names no folder"),
        ("file:///.", "names no folder"),
        ("file:///tmp/..", "names no folder"),
        ("file://$STATE/skerry", "a variable"),
        ("file:///$HOME", "a variable"),
        ("$STATE/skerry", "a variable"),
        ("file://~nobodyhere/s", "home of nobody"),
        ("file:///tmp/a%0Ab", "control character"),
        ("file:///tmp/a%00b", "control character"),
        ("~/store", f"did you mean file://{Path.home()}/store"),
        ("s3://bucket/a#1", r"has a \? or #"),
        ("s3://bucket/a?region=x", r"has a \? or #"),
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


@pytest.mark.parametrize("begin", ["file://{}/", "file://localhost{}/", "file:{}/", "FILE://{}/", " file://{}/"])
@pytest.mark.parametrize("path", ["my%20store", "my store", "a#1", "a%231", "a?b=c", "~x", "100%", "a;b", "ü"])
def test_all_of_a_path_is_the_path(begin: str, path: str) -> None:
    assert parse_url(begin.format("/data") + path) == ("file", Path("/data", unquote(path)))


def test_a_path_may_be_relative_or_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/of-me")
    assert parse_url("file://data/store") == ("file", tmp_path / "data/store")
    assert parse_url("file://~/store") == ("file", Path("/home/of-me/store"))


@pytest.mark.parametrize(
    "address",
    ["", " ", "127.0.0.1:9000", "minio:9000", "minio", "ftp://minio", "http://", "http://minio:99999", "http://a b",
     "http://minio?x=1", "http://minio#x", "http://[::1", "http:///bucket"],
)  # fmt: skip
def test_an_s3_address_that_is_no_url_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", address)
    with pytest.raises(StoreURLError, match=r"https://s3.example:9000. AWS_ENDPOINT_URL_S3="):
        open_objects("s3://bucket/x")
    with pytest.raises(StoreURLError, match="endpoint="):
        open_objects("s3://bucket/x", options={"endpoint": address, "access_key_id": "x", "secret_access_key": "x"})


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "ALL_PROXY"])
async def test_no_proxy_of_the_environment_is_used_for_an_s3_server_of_this_machine(
    variable: str, s3_options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    for host in ("127.0.0.1", "localhost"):
        options = {**s3_options, "endpoint": s3_options["endpoint"].replace("127.0.0.1", host)}
        with pytest.raises(ObjectMissingError):
            await open_objects("s3://skerry-test/proxies", options=options).get("a")


@pytest.mark.parametrize("words", [("verify", "demo"), ("serve", "--listen", "127.0.0.1:0")])
def test_a_command_that_a_bucket_refuses_ends_though_threads_of_it_do_not(
    words: tuple[str, ...], s3_options: dict[str, str]
) -> None:
    # As obstore's may go on after the last answer, and abort a process that is torn down meanwhile.
    program = (
        "import sys, threading; from skerry.cli.main import main; "
        "threading.Thread(target=threading.Event().wait).start(); main(sys.argv[1:])"
    )
    environment = {**os.environ, "AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": s3_options["endpoint"]}
    ended = subprocess.run(
        [sys.executable, "-c", program, words[0], "--store", "s3://no-such-bucket-here/x", *words[1:]],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "bucket does not exist" in errors[0]


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
        lambda objects: objects.get("runs/a/1", length=1),
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
