"""A damaged log is read up to its last good entry, no writer goes on with it, and what is certain is mended."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from skerry_syncer.store.errors import LogCorruptError
from skerry_syncer.store.log.entries import bytes_digest
from tests.unit.syncer.store.damaged_run import (
    DamagedRun,
    build,
    called,
    empty,
    flip,
    lose,
    reopened,
    repaired,
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
    assert "skerry repair" in heard.err
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


@pytest.mark.parametrize("damage", [empty, tear])
def test_a_last_entry_without_an_end_is_set_aside(
    run: DamagedRun, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    damage(run.entry(run.position))
    left, before = run.entry(run.position).read_bytes(), run.files()
    status, damages = repaired(run, capsys)
    assert (status, [one["remedy"] for one in damages]) == (1, ["set aside"])
    assert run.files() == before, "a dry run changes nothing"
    status, damages = repaired(run, capsys, "--yes")
    assert (status, [one["is_mended"] for one in damages]) == (0, [True])
    assert run.set_aside() == [left]
    assert reopened(run).position == run.position - 1
    assert repaired(run, capsys) == (0, [])


def test_a_whole_last_entry_is_set_aside_only_if_told(run: DamagedRun, capsys: pytest.CaptureFixture[str]) -> None:
    flip(run.entry(run.position))
    before = run.files()
    status, damages = repaired(run, capsys, "--yes")
    assert (status, [one["remedy"] for one in damages]) == (1, ["none"])
    assert "--give-up" in damages[0]["detail"]
    assert run.files() == before
    assert repaired(run, capsys, "--yes", "--give-up")[0] == 0
    assert reopened(run).position == run.position - 1


@pytest.mark.parametrize("fraction", [0.1, 0.35, 0.5, 0.85])
def test_one_wrong_bit_of_an_entry_is_put_right(
    run: DamagedRun, fraction: float, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run.entry(run.version(3).position)
    good = path.read_bytes()
    data = bytearray(good)
    data[int(fraction * len(good))] ^= 1  # in places this leaves JSON of other values
    path.write_bytes(bytes(data))
    status, damages = repaired(run, capsys, "--yes")
    assert (status, [(one["remedy"], one["is_mended"]) for one in damages]) == (0, [("restore", True)])
    assert path.read_bytes() == good
    assert run.set_aside() == [bytes(data)]
    assert called(run, "verify") == 0


@pytest.mark.parametrize("damage", [lose, empty, tear])
def test_an_older_entry_is_asked_for_by_its_digest_and_nothing_is_written(
    run: DamagedRun, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    path = run.entry(run.version(3).position)
    good = path.read_bytes()
    damage(path)
    lose(run.part(next(iter(run.state.fragments["body"].pending))))
    before = run.files()
    status, damages = repaired(run, capsys, "--yes", "--give-up")
    assert status == 1
    assert "backup" in damages[0]["detail"]
    assert bytes_digest(good) in damages[0]["detail"]
    assert run.files() == before, "nothing is appended to a log that is not whole"
