"""A damaged run is read as far as it is good; no writer goes on with a damaged log."""

from __future__ import annotations

import asyncio
import functools
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from safetensors.numpy import load_file

from skerry.cli.main import cli
from skerry.runtime.clock import SystemClock
from skerry.runtime.workers import InlineWorkers
from skerry.wire.policy import Policy
from skerry_syncer.store.errors import LogCorruptError, ObjectMissingError
from skerry_syncer.store.log.state import RunState, VersionState
from skerry_syncer.store.objects.opening import open_objects
from skerry_syncer.store.store import Store
from tests.support.merge_driver import FRAGMENT, INT4, Driver, layout_of
from tests.support.seeded_entropy import SeededEntropy

LAYOUT = layout_of((6, 6), (4,))


@dataclass
class DamagedRun:
    """The run's folder and its log as it was before any damage."""

    url: str
    folder: Path  # of the run
    state: RunState  # before the damage

    @property
    def position(self) -> int:
        """The log's last position before the damage."""
        return self.state.position

    def version(self, number: int) -> VersionState:
        """Returns a version of the only fragment."""
        return self.state.fragments[FRAGMENT].versions[number]

    def entry(self, position: int) -> Path:
        """Returns the file of a log entry."""
        return self.folder / "log" / f"{position:020}"

    def update(self, version: int) -> Path:
        """Returns the file of a version's update."""
        commit = self.version(version).commit
        assert commit is not None
        return self.folder / commit.commit.update[0].name

    def snapshot(self, version: int, kind: str) -> Path:
        """Returns a file of a version's snapshot."""
        refs = (*self.version(version).weights, *self.version(version).outer)
        (name,) = (ref.name for ref in refs if f"-{kind}-" in ref.name)
        return self.folder / name


def _store(url: str) -> Store:
    entropy = SeededEntropy(random.Random(1))
    return Store(open_objects(url), clock=SystemClock(), entropy=entropy, workers=InlineWorkers(), writer="test")


@functools.cache
def _trained() -> tuple[TemporaryDirectory[str], str, RunState]:
    folder = TemporaryDirectory(prefix="skerry-test-run-")

    async def train() -> Driver:
        url = f"file://{folder.name}/store"
        rng = np.random.default_rng(5)
        driver = await Driver.start(LAYOUT, Policy(update_encoding=INT4), objects=open_objects(url))
        for number in range(1, 7):
            deltas = [await driver.push(nth, rng.normal(size=LAYOUT.numel), encoding=INT4) for nth in range(2)]
            await driver.round(deltas, participation=0.5)
            if number in (2, 4):
                await driver.snapshot()
        await driver.push(0, rng.normal(size=LAYOUT.numel), encoding=INT4)
        await _store(url).publish(driver.log.spec.name, driver.log.spec.uid)
        await driver.log.close()
        return driver

    log = asyncio.run(train()).log
    return folder, log.prefix, log.state


@pytest.fixture
def run(tmp_path: Path) -> DamagedRun:
    """A run of six versions, with snapshots of 2 and 4, and one more delta."""
    template, prefix, state = _trained()
    shutil.copytree(Path(template.name) / "store", tmp_path / "store")
    return DamagedRun(f"file://{tmp_path}/store", tmp_path / "store" / prefix, state)


def reopened(run: DamagedRun) -> RunState:
    """Returns the state that a writer folds, which refuses a damaged log."""

    async def fold() -> RunState:
        store = _store(run.url)
        state = (await store.open_run("run", "0" * 32)).state
        await store.close()
        return state

    return asyncio.run(fold())


def called(run: DamagedRun, name: str, *arguments: str) -> int:
    """Runs a command on the run, and returns its exit status."""
    try:
        cli.main([name, "--store", run.url, "run", *arguments], standalone_mode=False)
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def lose(path: Path) -> None:
    """A file is gone."""
    path.unlink()


def empty(path: Path) -> None:
    """A file has no bytes, as after a power cut that an unsynced write did not survive."""
    path.write_bytes(b"")


def tear(path: Path) -> None:
    """A file has its first half, and zeros after it."""
    data = path.read_bytes()
    half = len(data) // 2
    path.write_bytes(data[:half] + bytes(len(data) - half))


def flip(path: Path) -> None:
    """One bit in the middle of a file is wrong."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x80
    path.write_bytes(bytes(data))


def spoil(path: Path) -> None:
    """One bit of a file's last byte is wrong."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


IN_PLACE = (empty, tear, flip)


@pytest.mark.parametrize("damage", IN_PLACE)
def test_the_tools_read_to_the_last_good_entry_and_say_so(
    run: DamagedRun, tmp_path: Path, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    at = run.version(4).position + 2  # after the snapshot of version 4
    damage(run.entry(at))
    out = tmp_path / "out.safetensors"
    capsys.readouterr()
    assert called(run, "log", "--json") == 1
    heard = capsys.readouterr()
    assert [json.loads(line)["position"] for line in heard.out.splitlines()] == list(range(1, at))
    assert f"up to position {at - 1}" in heard.err
    assert "backup" in heard.err
    assert called(run, "export", "--out", str(out), "--json") == 1
    heard = capsys.readouterr()
    assert json.loads(heard.out)["versions"] == {"body": 4}
    assert f"up to position {at - 1}" in heard.err
    assert called(run, "gc", "--keep-versions", "1", "--litter-age", "0s", "--json") == 1
    planned = json.loads(capsys.readouterr().out)["names"]
    assert planned
    assert not any("/5-" in name or "/6-" in name for name in planned), "later entries may name them"
    assert called(run, "verify", "--json") == 1
    said = json.loads(capsys.readouterr().out)
    assert said["versions_checked"] == 5
    assert f"after entry {at - 1}" in said["problems"][0]


def test_what_is_before_the_damage_can_be_asked_for_without_a_failure(
    run: DamagedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty(run.entry(run.position))
    out = tmp_path / "out.safetensors"
    position = str(run.version(3).position)
    assert called(run, "log", "--stop", position) == 0
    assert called(run, "export", "--out", str(out), "--position", position) == 0
    assert "damaged" not in capsys.readouterr().err


@pytest.mark.parametrize("damage", [lose, *IN_PLACE])
def test_no_writer_goes_on_with_a_damaged_log(run: DamagedRun, damage: Callable[[Path], None]) -> None:
    at = run.version(3).position
    damage(run.entry(at))
    with pytest.raises(LogCorruptError):
        reopened(run)
    with pytest.raises(LogCorruptError):
        called(run, "gc", "--yes")


def test_a_missing_entry_is_found_wherever_the_reads_are_cut(run: DamagedRun) -> None:
    for position in range(1, run.position):
        data = run.entry(position).read_bytes()
        lose(run.entry(position))
        with pytest.raises(LogCorruptError, match=f"position={position}"):
            reopened(run)
        run.entry(position).write_bytes(data)
    assert reopened(run).position == run.position


def test_verify_since_begins_at_the_snapshot_before(run: DamagedRun, capsys: pytest.CaptureFixture[str]) -> None:
    spoil(run.update(1))
    since = str(run.version(5).position)
    assert called(run, "verify") == 1
    capsys.readouterr()
    assert called(run, "verify", "--since", since, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["versions_checked"], said["versions_replayed"]) == (3, 2), "4 to 6; 4 by its snapshot"
    assert called(run, "verify", "--since", "7d", "--json") == 1, "all of it is of today"
    spoil(run.update(5))
    assert called(run, "verify", "--since", since) == 1


def test_an_export_of_what_was_collected_is_refused(
    run: DamagedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(run, "gc", "--keep-versions", "2", "--keep-since", "0s", "--yes", "--json") == 0
    assert json.loads(capsys.readouterr().out)["objects"]
    out, left = tmp_path / "out.safetensors", run.version(4).position
    with pytest.raises(ObjectMissingError) as refused:
        called(run, "export", "--out", str(out), "--position", str(run.version(3).position))
    assert "was collected" in str(refused.value)
    assert not out.exists()
    assert called(run, "export", "--out", str(out), "--position", str(left)) == 0
    assert len(load_file(out)) == 2


def test_an_export_goes_around_a_damaged_snapshot(
    run: DamagedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, around = tmp_path / "whole.safetensors", tmp_path / "around.safetensors"
    assert called(run, "export", "--out", str(whole)) == 0
    spoil(run.snapshot(4, "weights"))
    capsys.readouterr()
    assert called(run, "export", "--out", str(around), "--json") == 0
    assert json.loads(capsys.readouterr().out)["versions"] == {"body": 6}, "what is logged goes elsewhere"
    assert around.read_bytes() == whole.read_bytes()
