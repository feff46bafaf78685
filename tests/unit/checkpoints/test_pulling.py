"""A local checkpoint is brought to a version: from nothing, from an older or newer one, and after a kill."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from skerry import CorruptDownloadError
from skerry.checkpoints import pulling
from skerry.checkpoints.base_model import BaseModel
from skerry.checkpoints.folders import WEIGHTS, read_metadata, version_folder
from skerry.checkpoints.publisher import Publisher
from skerry.checkpoints.pulling import PullServer, pull_weights
from skerry.runtime.addresses import Address
from tests.support.killed import killed
from tests.support.versions import versions_of


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Six versions, of which 1 and 4 are full."""
    publisher = Publisher(tmp_path / "source", base=BaseModel((), ()), like=None, dtype="float32", keep=3)
    publisher._collect = lambda: None  # type: ignore[method-assign]  # all stay
    for version in versions_of(6):
        publisher.publish(version)
    metadata = [read_metadata(version_folder(tmp_path / "source", number)) for number in range(1, 7)]
    assert ["base_version" in values for values in metadata] == [False, True, True] * 2
    return tmp_path / "source"


def weights(local: Path) -> bytes:
    return (local / WEIGHTS).read_bytes()


def expected(source: Path, number: int) -> bytes:
    """Returns the weights of a version as somebody has them who pulls nothing else."""
    fresh = source.with_name(f"fresh{number}")
    pull_weights(fresh, source, number)
    return weights(fresh)


def test_late_lagging_and_steady_checkpoints_have_the_same_bytes(source: Path, tmp_path: Path) -> None:
    steady, lagging = tmp_path / "steady", tmp_path / "lagging"
    pull_weights(lagging, source, 1)
    for number in range(1, 7):
        pull_weights(steady, source, number)
        assert weights(steady) == expected(source, number)
        shown, published = read_metadata(steady), read_metadata(version_folder(source, number))
        assert all(shown[key] == published[key] for key in ("version", "position", "versions", "checksums"))
        assert "base_version" not in shown, "it is whole"
    pull_weights(lagging, source, 6)
    assert weights(lagging) == weights(steady)
    pull_weights(lagging, source, 2)
    assert weights(lagging) == expected(source, 2)


@pytest.mark.long
def test_a_checkpoint_that_lags_by_a_hundred_versions_catches_up(tmp_path: Path) -> None:
    source, lagging = tmp_path / "source", tmp_path / "lagging"
    publisher = Publisher(source, base=BaseModel((), ()), like=None, dtype="bfloat16", keep=200)
    for version in versions_of(102):
        publisher.publish(version)
        if version.versions["body"] == 0:
            pull_weights(lagging, source, publisher.number)
    pull_weights(lagging, source, 102)
    assert weights(lagging) == expected(source, 102)


def test_deltas_are_applied_to_the_version_that_is_there(source: Path, tmp_path: Path) -> None:
    pull_weights(tmp_path / "local", source, 5)
    for number in (4, 5):
        version_folder(source, number).rename(tmp_path / str(number))
    pull_weights(tmp_path / "local", source, 6)
    with pytest.raises(FileNotFoundError, match="no such version, or it was collected"):
        pull_weights(tmp_path / "late", source, 6)
    with pytest.raises(FileNotFoundError):
        pull_weights(tmp_path / "late", source, 9)


@pytest.mark.parametrize(("number", "which"), [(5, "delta"), (4, "full")])
def test_a_tensor_without_its_checksum_is_refused_and_the_next_pull_begins_anew(
    number: int, which: str, source: Path, tmp_path: Path
) -> None:
    local, path = tmp_path / "local", version_folder(source, number) / WEIGHTS
    pull_weights(local, source, 3 if which == "full" else 4)
    whole = path.read_bytes()
    if which == "full":
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    else:  # the local copy is damaged
        damaged = weights(local)
        (local / WEIGHTS).write_bytes(damaged[:-1] + bytes([damaged[-1] ^ 1]))
    with pytest.raises(CorruptDownloadError, match="do not have their checksums"):
        pull_weights(local, source, 6)
    path.write_bytes(whole)
    pull_weights(local, source, 6)
    assert weights(local) == expected(source, 6)


@pytest.mark.parametrize("count", range(1, 4))
def test_a_pull_that_is_killed_between_two_tensors_is_made_up_for(count: int, source: Path, tmp_path: Path) -> None:
    local = tmp_path / "local"
    pull_weights(local, source, 4)

    assert killed(lambda: pull_weights(local, source, 6), pulling, "apply", count)
    pull_weights(local, source, 6)
    assert weights(local) == expected(source, 6)


def test_a_folder_with_files_of_others_is_left_alone(source: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis").touch()
    with pytest.raises(ValueError, match="no pull has made"):
        pull_weights(tmp_path / "home", source, 6)
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["thesis"]


@contextmanager
def serving() -> Iterator[str]:
    with PullServer(Address("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def post(url: str, request: object, **headers: str) -> tuple[int, dict[str, Any]]:
    data = json.dumps(request).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        body = error.read()
        return error.code, json.loads(body) if body.startswith(b"{") else {}


def test_an_engine_asks_over_http_and_hears_what_went_wrong(source: Path, tmp_path: Path) -> None:
    request = {"local_checkpoint_dir": str(tmp_path / "local"), "source_dir": str(source), "target_version": 6}
    with serving() as url:
        assert post(f"{url}/pull_weights", request) == (200, {"success": True, "message": ""})
        assert weights(tmp_path / "local") == expected(source, 6)
        status, answer = post(f"{url}/pull_weights", request | {"target_version": 7})
        assert (status, answer["success"]) == (400, False)
        assert "no such version" in answer["message"]
        wrongs: list[object] = [{}, [], request | {"target_version": "x"}]
        for wrong in wrongs:
            assert post(f"{url}/pull_weights", wrong)[0] == 400
        assert post(f"{url}/elsewhere", request)[0] == 404
        assert post(f"{url}/pull_weights", request, Origin="http://page.example")[0] == 404
