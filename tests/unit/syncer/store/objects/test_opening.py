"""A store URL that can't be used says what to do, before anything is done; a volume that is away is no empty store."""

import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from urllib.parse import unquote

import pytest

from skerry.runtime.identifiers import SystemEntropy
from skerry.runtime.workers import Arguments, InlineWorkers, Result
from skerry_syncer.store.errors import ObjectMissingError, StoreRefusedError, StoreUnavailableError, StoreURLError
from skerry_syncer.store.objects.interface import ObjectInfo, Objects
from skerry_syncer.store.objects.local import MARKER, LocalObjects
from skerry_syncer.store.objects.opening import open_objects, parse_url
from tests.e2e.azurite import AZURITE
from tests.support.dict_objects import joined


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("/var/lib/skerry", "did you mean file:///var/lib/skerry"),
        ("~/store", f"did you mean file://{Path.home()}/store"),
        ("", "no scheme"),
        ("gcs://bucket/prefix", "use file:///.* gs://bucket/prefix, az://container/prefix"),
        ("s3:///prefix", "needs a bucket"),
        ("gs://", "needs a bucket; gs://bucket/prefix"),
        ("az:///prefix", "needs a bucket; az://"),
        ("s3://bucket/a#1", r"has a \? or #.*AWS_ENDPOINT_URL"),
        ("gs://bucket/a?b=c", r"has a \? or #.*GOOGLE_BASE_URL"),
        ("az://container/a#1", r"has a \? or #.*AZURE_STORAGE_ACCOUNT_NAME"),
        ("file://", "names no folder"),
        ("file://localhost", "names no folder"),
        ("file:///tmp/..", "names no folder"),
        ("file:///$HOME", "a variable"),
        ("file://~nobodyhere/s", "home of nobody"),
        ("file:///tmp/a%00b", "control character"),
        ("file:///dev/null", "can't be used"),
        ("file:///dev/null/store", "can't be used"),
    ],
)
def test_a_url_that_cannot_be_a_store_says_what_would(url: str, advice: str) -> None:
    with pytest.raises(StoreURLError, match=advice):
        open_objects(url)


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
    ("url", "variable"),
    [
        ("s3://bucket/x", "AWS_ENDPOINT_URL_S3"),
        ("gs://bucket/x", "GOOGLE_BASE_URL"),
        ("az://c/x", "AZURE_STORAGE_ENDPOINT"),
    ],
)
@pytest.mark.parametrize(
    "address",
    ["", "minio:9000", "ftp://minio", "http://", "http://minio:99999", "http://a b", "http://minio?x=1", "http://[::1"],
)
def test_a_server_whose_address_is_no_url_is_refused(
    address: str, url: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, address)
    with pytest.raises(StoreURLError, match=rf"https://storage.example:9000. {variable}="):
        open_objects(url)


def test_without_an_account_azure_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    with pytest.raises(StoreURLError, match="AZURE_STORAGE_ACCOUNT_NAME sets the account"):
        open_objects("az://container/x")
    open_objects("az://container@account.blob.core.windows.net/x")


def test_a_key_file_that_is_not_there_is_refused_with_the_variables_that_may_name_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SERVICE_ACCOUNT", "skerry@project")  # which clusters set for other purposes
    with pytest.raises(StoreURLError, match=r"or SERVICE_ACCOUNT a key file.*skerry@project"):
        open_objects("gs://bucket/x")


@pytest.mark.parametrize("kind", ["s3", "gs"])
async def test_no_proxy_of_the_environment_is_used_for_a_server_of_this_machine(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = request.getfixturevalue(f"{kind}_url")
    for variable in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    with pytest.raises(ObjectMissingError):
        await open_objects(url).get("a")


@pytest.mark.parametrize("url", ["s3://bucket/x", "gs://bucket/x", "az://container/x"])
async def test_a_server_that_is_not_there_is_unavailable(url: str) -> None:
    with pytest.raises(StoreUnavailableError, match=r"//127\.0\.0\.1:9/"):  # to which all tests' environment leads
        await open_objects(url).get("a")


@pytest.mark.parametrize("kind", ["s3", "gs", pytest.param("az", marks=AZURITE)])
async def test_a_bucket_that_does_not_exist_is_no_empty_one(kind: str, request: pytest.FixtureRequest) -> None:
    scheme = request.getfixturevalue(f"{kind}_url").partition(":")[0]
    objects = open_objects(f"{scheme}://no-such-bucket-here/x")
    for call in (
        objects.get("a"), objects.create("a", b""), objects.write("a", b""), objects.folders("a"),
        joined(objects.stream("a")), _listed(objects.list("")),
    ):  # fmt: skip
        with pytest.raises(StoreRefusedError, match="bucket does not exist"):
            await call


@pytest.mark.usefixtures("s3_url")
def test_a_command_that_a_bucket_refuses_ends_though_threads_of_it_do_not() -> None:
    # As obstore's may go on after the last answer, and abort a process that is torn down meanwhile.
    program = (
        "import sys, threading; from skerry.cli.main import main; "
        "threading.Thread(target=threading.Event().wait).start(); main(sys.argv[1:])"
    )
    words = ["verify", "demo", "--store", "s3://no-such-bucket-here/x"]
    ended = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2
    (error,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert "bucket does not exist" in error


@pytest.mark.parametrize("folder", ["mount", "mount/store", "mount/of/a/store"])
def test_without_a_marker_a_store_is_begun_only_if_asked_for(tmp_path: Path, folder: str) -> None:
    """Its volume may not be mounted: `mount` is the mount point, and the store is that or a folder below."""
    url = f"file://{tmp_path}/{folder}"
    (tmp_path / "mount").mkdir()
    with pytest.raises(StoreURLError, match=r"there is no store.*volume mounted.*--new-store"):
        open_objects(url, new=False)
    assert [path.name for path in tmp_path.rglob("*")] == ["mount"]
    for new in (True, True, False):
        open_objects(url, new=new)
    assert (tmp_path / folder / MARKER).read_bytes() == b'{"format":1}'


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


async def _listed(infos: AsyncIterator[ObjectInfo]) -> set[tuple[str, int]]:
    return {(info.name, info.size_bytes) async for info in infos}


@pytest.mark.parametrize("back_before_job", [1, 2, 3])
@pytest.mark.parametrize(
    "read",
    [
        lambda objects: objects.get("runs/a/1"),
        lambda objects: joined(objects.stream("runs/a/1")),
        lambda objects: objects.folders("runs"),
        lambda objects: _listed(objects.list("")),
    ],
)
async def test_nothing_is_missing_because_its_volume_is_away(
    tmp_path: Path, read: Callable[[Objects], Awaitable[object]], back_before_job: int
) -> None:
    root = tmp_path / "store"
    written = open_objects(f"file://{root}")
    await written.create("runs/a/1", b"one")
    content = await read(written)
    workers = _ReturningWorkers(root, back_before_job)
    objects = LocalObjects(root, workers=workers, entropy=SystemEntropy(), is_marked=True)
    root.rename(tmp_path / "away")
    root.mkdir()
    with contextlib.suppress(StoreUnavailableError):
        assert await read(objects) == content
