"""`skerry log`, `export`, `verify` and `gc` on the golden store, as a person and a script call them."""

import asyncio
import json
import os
import shutil
import time
from pathlib import Path

import click
import pytest
from safetensors import safe_open

from skerry.cli.main import cli
from skerry.runtime.clock import SystemClock
from skerry.runtime.identifiers import SystemEntropy
from skerry.runtime.workers import ThreadWorkers
from skerry_syncer.store.log.entries import Decided, Fate, Item, RunStatus, SessionItem, StatusItem
from skerry_syncer.store.objects.opening import open_objects
from skerry_syncer.store.store import Store
from tests.support.history import BODY, EMBED, SPEC, accepted, closed, committed, snapshot
from tests.unit.syncer.store.make_golden import DTYPES, GOLDEN


@pytest.fixture
def store_url(tmp_path: Path) -> str:
    shutil.copytree(GOLDEN / "store", tmp_path / "store")
    return f"file://{tmp_path}/store"


def run(name: str, *arguments: str) -> int:
    """Runs a command as its group would, and returns its exit status."""
    try:
        cli.main([name, *arguments], standalone_mode=False)
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_the_log_is_a_table_with_effects(store_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    run("log", "--store", store_url, "golden", "--last", "20")
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split() == ["position", "time", "(UTC)", "writer", "kind", "what", "effect"]
    end = json.loads((GOLDEN / "expected.json").read_bytes())["position"]
    assert shown[1].startswith(f"{end - 19} ")
    assert any("committed" in line and "2 merged" in line for line in shown)


def test_the_log_as_json_has_one_entry_a_line_and_no_whole_session_id(
    store_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run("log", "--store", store_url, "golden", "--start", "5", "--stop", "8", "--json")
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [entry["position"] for entry in entries] == [5, 6, 7]
    assert [item["kind"] for entry in entries for item in entry["items"]] == ["accepted", "accepted", "closed"]
    assert all(item["is_admitted"] for entry in entries for item in entry["items"])
    assert {len(item["session"]) for entry in entries for item in entry["items"] if "session" in item} == {8}


async def _write(folder: Path, *groups: list[Item]) -> str:
    """Writes a run with one entry a group and returns the store's URL."""
    url = f"file://{folder}/other"
    workers = ThreadWorkers(1)
    store = Store(open_objects(url), clock=SystemClock(), entropy=SystemEntropy(), workers=workers, writer="test")
    log = (await store.create_draft(SPEC)).log
    await store.publish(SPEC.name, SPEC.uid)
    for group in groups:
        await log.append(group)
    await store.close()
    workers.close()
    return url


def test_the_log_as_json_says_what_the_fold_decided_of_every_item_and_delta(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store_url = asyncio.run(
        _write(
            tmp_path,
            [snapshot(0, EMBED), snapshot(0), StatusItem(RunStatus.OPEN)],
            [SessionItem("m0", "m0-s1", ""), SessionItem("m1", "m1-s1", ""), accepted("a"), accepted("b", "m1")],
            [SessionItem("m0", "m0-s2", "")],
            # From a fenced session, beside one that takes effect: only then does it reach the log.
            [accepted("c"), accepted("d", session="m0-s2")],
            [closed("d", decided=(Decided("b", Fate.QUARANTINED, "too large"),))],
            [committed()],
            [accepted("e", session="m0-s2", base=1)],
        )
    )
    capsys.readouterr()
    run("log", "--store", store_url, "run", "--json")
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    items = [(item["kind"], item["is_admitted"], item["rejection"]) for item in entries[3]["items"]]
    assert items == [("accepted", False, "SESSION_FENCED"), ("accepted", True, None)]
    assert "newer session" in entries[3]["items"][0]["rejection_detail"]
    assert [{one["delta"]: one["fate"] for one in entry["fates"]} for entry in entries] == [
        {},
        {"a": "pending", "b": "pending"},
        {},
        {"d": "pending", "a": "superseded"},
        {"b": "quarantined"},
        {"d": "merged"},
        {"e": "pending"},
    ]
    last = {one["delta"]: one for entry in entries for one in entry["fates"]}
    where = {"delta": "a", "fragment": BODY, "learner": "m0"}
    said = {"fate": "superseded", "version": None, "reason": "a newer session of the learner sent its own"}
    assert last["a"] == where | said
    assert (last["d"]["version"], last["b"]["reason"]) == (1, "too large")
    assert "c" not in last
    run("log", "--store", store_url, "run")
    shown = capsys.readouterr().out
    assert "1 superseded of m0" in shown
    assert "1 quarantined of m1" in shown


@pytest.mark.parametrize("position", ["2", "8", None])
def test_an_export_has_every_tensor_in_its_own_type(
    store_url: str, tmp_path: Path, position: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    at = [] if position is None else ["--position", position]
    run("export", "--store", store_url, "golden", "--out", str(tmp_path / "out.safetensors"), "--json", *at)
    said = json.loads(capsys.readouterr().out)
    with safe_open(tmp_path / "out.safetensors", framework="numpy") as file:
        found = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 - not a dict
        metadata = file.metadata()
    codes = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
    wanted = {name: codes[dtype] for name, dtype in DTYPES.items()}
    wanted["__metadata__.tensor"] = wanted.pop("__metadata__")
    assert found == wanted
    assert json.loads(metadata["versions"]) == said["versions"] == {"body": {"2": 0, "8": 1, None: 5}[position]}
    assert (metadata["run"], metadata["position"]) == ("golden", str(said["position"]))
    assert [path.name for path in tmp_path.glob("out*")] == ["out.safetensors"], "nothing half written is left"


def test_an_export_that_cannot_be_written_says_why(store_url: str, tmp_path: Path) -> None:
    out = tmp_path / "missing" / "out.safetensors"
    with pytest.raises(click.BadParameter, match=r"can't be written: No such file or directory\. path="):
        run("export", "--store", store_url, "golden", "--out", str(out))


def test_gc_says_what_would_go_and_deletes_only_when_told(
    store_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def file_count() -> int:
        return sum(path.is_file() and "log" not in path.parts for path in (tmp_path / "store").rglob("*"))

    arguments = ("--store", store_url, "golden", "--keep-versions", "1", "--json")
    before = file_count()
    run("gc", *arguments)
    planned = json.loads(capsys.readouterr().out)
    assert planned["is_dry_run"]
    assert file_count() == before
    run("gc", *arguments, "--yes")
    done = json.loads(capsys.readouterr().out)
    assert done["names"] == planned["names"]
    assert file_count() == before - done["objects"]
    assert run("verify", "--store", store_url, "golden") == 0


def _with_draft(folder: Path) -> Path:
    """Copies the golden run as one that never got the name, a year old; and one of today."""
    runs = folder / "store" / "runs" / "golden"
    source = next(path for path in runs.iterdir() if path.name != "names")
    for uid, age_s in (("e" * 32, 365 * 86_400.0), ("f" * 32, 0.0)):
        shutil.copytree(source, runs / uid)
        for path in (runs / uid).rglob("*"):
            os.utime(path, (time.time() - age_s,) * 2)
    return runs


def test_gc_lists_old_drafts_and_deletes_them_when_told(
    store_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = _with_draft(tmp_path)
    lost = [path for path in (runs / ("e" * 32)).rglob("*") if path.is_file()]
    arguments = ("--store", store_url, "golden")
    run("gc", *arguments)
    size = sum(path.stat().st_size for path in lost)
    shown = capsys.readouterr().out
    assert f"would delete draft {'e' * 32}: {len(lost)} objects, {size} bytes" in shown
    assert "f" * 32 not in shown
    assert all(path.exists() for path in lost)
    run("gc", *arguments, "--yes", "--json")
    said = json.loads(capsys.readouterr().out)
    assert said["runs"] == [{"uid": "e" * 32, "kind": "draft", "objects": len(lost), "size_bytes": size}]
    assert not any(path.exists() for path in lost)
    assert (runs / ("f" * 32) / "run.json").exists()
    assert run("verify", "--store", store_url, "golden") == 0


def test_gc_finds_drafts_of_a_name_that_nobody_ever_had(
    store_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = _with_draft(tmp_path)
    for path in list(runs.iterdir()):
        if path.name not in ("e" * 32, "f" * 32):
            shutil.rmtree(path)
    run("gc", "--store", store_url, "golden", "--yes", "--json")
    said = json.loads(capsys.readouterr().out)
    assert ([one["uid"] for one in said["runs"]], said["objects"]) == (["e" * 32], 0)


def test_gc_of_all_runs_takes_the_drafts_of_every_name(
    store_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = _with_draft(tmp_path)
    shutil.copytree(runs / ("e" * 32), runs.parent / "other" / ("e" * 32), copy_function=shutil.copy2)
    run("gc", "--store", store_url, "--all", "--yes", "--json")
    said = {one["run"]: one for one in map(json.loads, capsys.readouterr().out.splitlines())}
    assert {name: [draft["uid"] for draft in one["runs"]] for name, one in said.items()} == {
        "golden": ["e" * 32],
        "other": ["e" * 32],
    }
    assert run("verify", "--store", store_url, "golden") == 0
    with pytest.raises(click.UsageError, match="a run or --all"):
        run("gc", "--store", store_url)


@pytest.mark.parametrize("text", ["7", "d", "7 d", "-1d", "1y"])
def test_a_duration_without_sense_is_refused_with_an_example(store_url: str, text: str) -> None:
    with pytest.raises(click.BadParameter, match="as in 12h"):
        run("gc", "--store", store_url, "golden", "--keep-since", text)


def test_a_run_that_is_not_there_is_answered_with_those_that_are(store_url: str) -> None:
    from skerry_syncer.store.errors import RunNotFoundError

    with pytest.raises(RunNotFoundError, match="golden"):
        run("log", "--store", store_url, "goldem")
