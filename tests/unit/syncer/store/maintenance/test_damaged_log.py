"""A damaged run is read as far as it is good; no writer goes on with a damaged log."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from skerry_syncer.store.errors import LogCorruptError, ObjectMissingError
from tests.unit.syncer.store.damaged_run import (
    DamagedRun,
    build,
    called,
    empty,
    flip,
    lose,
    reopened,
    spoil,
    tear,
)

IN_PLACE = (empty, tear, flip)


@pytest.fixture
def run(tmp_path: Path) -> DamagedRun:
    return build(tmp_path)


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
