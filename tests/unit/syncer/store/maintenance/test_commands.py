"""`skerry log`, `export`, `verify` and `gc` on the golden store and its damaged copies, as a script calls them."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from safetensors import safe_open

from skerry.cli.main import cli
from skerry_syncer.store.errors import LogCorruptError, RunNotFoundError
from tests.unit.syncer.store.make_golden import DTYPES, GOLDEN

Answer = dict[str, Any]
UID, END = (json.loads((GOLDEN / "expected.json").read_bytes())[name] for name in ("uid", "position"))
OLD_DRAFT, YOUNG_DRAFT = "e" * 32, "f" * 32
SNAPSHOT_2, COMMIT_5 = 12, 24  # positions of the golden log


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A copy of the golden store; its run has versions 0 to 5, with snapshots of 0, 2 and 4, a roll-back to 1."""
    return Path(shutil.copytree(GOLDEN / "store", tmp_path / "store"))


@pytest.fixture
def call(store: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, list[Answer], str]]:
    """Runs a command of the golden run; returns its exit status, the JSON lines that it prints, and its warnings."""

    def called(name: str, *arguments: str | Path, run: str = "golden") -> tuple[int, list[Answer], str]:
        capsys.readouterr()
        status = 0
        words = [name, "--store", store.as_uri(), "--json", *filter(None, [run]), *map(str, arguments)]
        try:
            cli.main(words, standalone_mode=False)
        except SystemExit as stop:
            status = int(stop.code or 0)
        printed = capsys.readouterr()
        return status, [json.loads(line) for line in printed.out.splitlines()], printed.err

    return called


Call = Callable[..., tuple[int, list[Answer], str]]


def entry(store: Path, position: int) -> Path:
    return store / f"runs/golden/{UID}/log/{position:020}"


def spoil_update(store: Path, version: int) -> None:
    """Flips a bit of the last byte of a version's update."""
    (path,) = (store / "runs/golden" / UID / "updates/body").glob(f"{version}-*")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_the_log_is_a_table_with_effects(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["log", "--store", store.as_uri(), "golden", "--last", "20"], standalone_mode=False)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split() == ["position", "time", "(UTC)", "writer", "kind", "facts", "effect"]
    assert shown[1].startswith(f"{END - 19} ")
    assert any("committed" in line and "2 merged of m0, m1" in line for line in shown)


def test_the_log_as_json_has_one_entry_a_line_and_no_whole_session_id(call: Call) -> None:
    _, entries, _ = call("log", "--start", "5", "--stop", "8")
    assert [entry["position"] for entry in entries] == [5, 6, 7]
    assert [item["kind"] for entry in entries for item in entry["items"]] == ["accepted", "accepted", "closed"]
    assert {len(item["session"]) for entry in entries for item in entry["items"] if "session" in item} == {8}


@pytest.mark.parametrize(("position", "version"), [("2", 0), ("8", 1), (None, 5)])
def test_an_export_has_every_tensor_in_its_own_type(
    call: Call, tmp_path: Path, position: str | None, version: int
) -> None:
    out = tmp_path / "out.safetensors"
    _, (answer,), _ = call("export", "--out", out, *(("--position", position) if position else ()))
    with safe_open(out, framework="numpy") as file:
        codes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 - not a dict
        metadata = file.metadata()
    names = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
    wanted = {name: names[dtype] for name, dtype in DTYPES.items()}
    wanted["__metadata__.tensor"] = wanted.pop("__metadata__")
    assert codes == wanted
    assert json.loads(metadata["versions"]) == answer["versions"] == {"body": version}
    assert (metadata["run"], metadata["position"]) == ("golden", str(answer["position"]))
    assert [path.name for path in tmp_path.glob("out*")] == [out.name], "nothing half written is left"


def test_an_export_that_cannot_be_written_says_why(call: Call, tmp_path: Path) -> None:
    with pytest.raises(click.BadParameter, match=r"can't be written: File name too long\. path="):
        call("export", "--out", tmp_path / ("a" * 255))  # the longest name, and so too long for its partial file


def test_gc_says_what_would_go_and_deletes_only_when_told(call: Call, store: Path) -> None:
    def blob_count() -> int:
        return sum(path.is_file() and "log" not in path.parts for path in store.rglob("*"))

    before = blob_count()
    _, (planned,), _ = call("gc", "--keep-versions", "1")
    assert planned["is_dry_run"]
    assert blob_count() == before
    _, (done,), _ = call("gc", "--keep-versions", "1", "--yes")
    assert done["names"] == planned["names"] != []
    assert blob_count() == before - done["objects"]
    assert call("verify")[0] == 0


def test_gc_lists_old_drafts_of_every_name_and_deletes_them_when_told(call: Call, store: Path) -> None:
    """Copies of the golden run that never got the name are a year old, or of today; one is of another name."""
    old = [store / "runs" / name / OLD_DRAFT for name in ("golden", "other")]
    young = store / "runs/golden" / YOUNG_DRAFT
    source = store / "runs/golden" / UID
    for folder, age_s in ((old[0], 365 * 86_400.0), (old[1], 365 * 86_400.0), (young, 0.0)):
        shutil.copytree(source, folder)
        for path in folder.rglob("*"):
            os.utime(path, (time.time() - age_s,) * 2)
    sizes = [path.stat().st_size for path in old[0].rglob("*") if path.is_file()]
    draft = {"uid": OLD_DRAFT, "kind": "draft", "objects": len(sizes), "size_bytes": sum(sizes)}
    _, planned, _ = call("gc", "--all", run="")
    assert all(folder.exists() for folder in old)
    _, done, _ = call("gc", "--all", "--yes", run="")
    for answers in (planned, done):
        assert {answer["run"]: answer["runs"] for answer in answers} == {"golden": [draft], "other": [draft]}
    assert not any((folder / "run.json").exists() for folder in old)
    assert (young / "run.json").exists()
    assert call("verify")[0] == 0
    with pytest.raises(click.UsageError, match="a run or --all"):
        call("gc", run="")


@pytest.mark.parametrize("text", ["7", "d", "7 d", "-1d", "1y"])
def test_a_duration_without_sense_is_refused_with_an_example(call: Call, text: str) -> None:
    with pytest.raises(click.BadParameter, match="as in 12h"):
        call("gc", "--keep-since", text)


def test_a_run_that_is_not_there_is_answered_with_those_that_are(call: Call) -> None:
    with pytest.raises(RunNotFoundError, match="golden"):
        call("log", run="goldem")


@pytest.fixture
def bare_log(store: Path) -> None:
    """The run has no checkpoint, so that it is opened from its first entry on."""
    shutil.rmtree(store / f"runs/golden/{UID}/checkpoints")


@pytest.mark.parametrize("is_lost", [False, True])
def test_the_log_is_shown_up_to_its_damage_though_a_checkpoint_follows(call: Call, store: Path, is_lost: bool) -> None:
    entry(store, 3).unlink() if is_lost else entry(store, 3).write_bytes(b"")
    status, entries, warning = call("log")
    assert (status, [line["position"] for line in entries]) == (1, [1, 2])
    assert "up to position 2; restore the entry after it from a backup" in warning
    status, (verified,), _ = call("verify")
    assert (status, verified["versions_checked"]) == (1, 6)
    assert "after entry 2: " in verified["problems"][0]


@pytest.mark.usefixtures("bare_log")
def test_the_tools_read_to_the_last_good_entry_and_say_so(call: Call, store: Path, tmp_path: Path) -> None:
    damaged = SNAPSHOT_2 + 1
    entry(store, damaged).write_bytes(b"")
    status, entries, warning = call("log")
    assert (status, [line["position"] for line in entries]) == (1, list(range(1, damaged)))
    assert f"up to position {damaged - 1}; " in warning
    status, (exported,), warning = call("export", "--out", tmp_path / "out.safetensors")
    assert (status, exported["versions"]) == (1, {"body": 2})
    assert f"up to position {damaged - 1}" in warning
    status, (planned,), _ = call("gc", "--keep-versions", "1", "--litter-age", "0s")
    assert status == 1
    assert planned["names"]
    assert not any("/3-" in name or "/5-" in name for name in planned["names"]), "later entries may name them"
    status, (verified,), _ = call("verify")
    assert (status, verified["versions_checked"]) == (1, 3)
    assert f"after entry {damaged - 1}" in verified["problems"][0]


def test_what_is_before_the_damage_can_be_asked_for_without_a_failure(call: Call, store: Path, tmp_path: Path) -> None:
    entry(store, END).write_bytes(b"")
    for words in (("log", "--stop", "5"), ("export", "--position", "8", "--out", tmp_path / "out.safetensors")):
        status, _, warning = call(*words)
        assert (status, "damaged" in warning) == (0, False)


@pytest.mark.usefixtures("bare_log")
def test_no_writer_goes_on_with_a_log_that_lacks_an_entry_wherever_the_reads_are_cut(call: Call, store: Path) -> None:
    for position in range(1, END):
        data = entry(store, position).read_bytes()
        entry(store, position).unlink()
        with pytest.raises(LogCorruptError, match=f"position={position}"):
            call("gc", "--yes")
        entry(store, position).write_bytes(data)
    assert call("gc", "--yes")[0] == 0


def test_verify_since_begins_at_the_snapshot_before(call: Call, store: Path) -> None:
    spoil_update(store, 1)
    assert call("verify")[0] == 1
    status, (verified,), _ = call("verify", "--since", str(COMMIT_5))
    assert status == 0
    assert (verified["versions_checked"], verified["versions_replayed"]) == (2, 1), "4 and 5; 4 by its snapshot"
    assert call("verify", "--since", "7d")[0] == 1, "all of it is of less than a minute"
    spoil_update(store, 5)
    assert call("verify", "--since", str(COMMIT_5))[0] == 1
