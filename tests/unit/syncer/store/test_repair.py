"""`skerry repair` mends every damage that the rest of the store allows to mend, and overwrites nothing good."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from skerry.runtime.workers import InlineWorkers
from skerry_syncer.store.errors import ObjectMissingError
from skerry_syncer.store.log.entries import Fate
from skerry_syncer.store.log.retention import Retention
from skerry_syncer.store.maintenance.collect import collect
from skerry_syncer.store.maintenance.repair import Repair
from skerry_syncer.store.versions.scratch import Scratch
from tests.support.seeded_entropy import SeededEntropy
from tests.unit.algorithm.merge_driver import FRAGMENT
from tests.unit.syncer.store.damaged_run import (
    DAMAGES,
    DamagedRun,
    build,
    called,
    empty,
    lose,
    reopened,
    repaired,
    spoil,
    store_of,
)


@pytest.fixture
def run(tmp_path: Path) -> DamagedRun:
    return build(tmp_path)


def test_nothing_is_damaged(run: DamagedRun, capsys: pytest.CaptureFixture[str]) -> None:
    before = run.files()
    assert repaired(run, capsys, "--yes", "--give-up") == (0, [])
    assert run.files() == before
    assert called(run, "repair") == 0
    assert capsys.readouterr().out == "ok: nothing is damaged\n"


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    "which", ["snapshot 2 weights", "snapshot 4 momentum", "snapshot 4 residual", "update 1", "update 4", "update 6"]
)
def test_a_lost_snapshot_or_update_is_made_again(
    run: DamagedRun, which: str, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    what, number, *kind = which.split()
    path = run.snapshot(int(number), kind[0]) if what == "snapshot" else run.update(int(number))
    before = run.files()
    damage(path)
    left = [path.read_bytes()] if path.exists() else []
    damaged = run.files()
    status, damages = repaired(run, capsys)
    assert (status, [one["remedy"] for one in damages]) == (1, ["restore"])
    assert run.files() == damaged, "a dry run changes nothing"
    status, damages = repaired(run, capsys, "--yes")
    assert (status, [one["is_mended"] for one in damages]) == (0, [True])
    assert run.files() == before
    assert run.set_aside() == left
    assert called(run, "verify") == 0


def test_several_lost_objects_are_made_again_from_one_another(
    run: DamagedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    before = run.files()
    for path in (run.snapshot(4, "weights"), run.snapshot(4, "momentum"), run.update(3), run.update(5)):
        lose(path)
    status, damages = repaired(run, capsys, "--yes")
    assert (status, len(damages)) == (0, 4)
    assert run.files() == before


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_pending_delta_with_a_lost_part_is_quarantined(
    run: DamagedRun, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    lost, *others = run.state.fragments[FRAGMENT].pending
    damage(run.part(lost))
    status, damages = repaired(run, capsys, "--yes")
    assert (status, [one["remedy"] for one in damages]) == (0, ["quarantine"])
    state = reopened(run)
    assert state.deltas[lost].fate is Fate.QUARANTINED
    assert list(state.fragments[FRAGMENT].pending) == others
    assert repaired(run, capsys) == (0, [])


def test_a_frozen_round_is_closed_again_without_the_lost_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = build(tmp_path, finish="frozen")
    first = run.state.fragments[FRAGMENT].closing
    assert first is not None
    lost = first.members[1].delta
    lose(run.part(lost))
    assert repaired(run, capsys, "--yes")[0] == 0
    state = reopened(run)
    again = state.fragments[FRAGMENT].closing
    assert again is not None
    assert (again.version, again.attempt) == (first.version, first.attempt + 1)
    assert again.members == (first.members[0], first.members[2])
    assert again.participation == pytest.approx(first.participation / 2), "half of the weight is left"
    assert again.length == first.length
    assert state.deltas[lost].fate is Fate.QUARANTINED


def test_a_frozen_round_of_lost_parts_only_is_void(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = build(tmp_path, finish="frozen")
    closing = run.state.fragments[FRAGMENT].closing
    assert closing is not None
    for member in closing.members:
        lose(run.part(member.delta))
    assert repaired(run, capsys, "--yes")[0] == 0
    state = reopened(run)
    assert (state.fragments[FRAGMENT].closing, state.fragments[FRAGMENT].next_attempt) == (None, 2)
    assert {state.deltas[member.delta].fate for member in closing.members} == {Fate.QUARANTINED}


def test_another_write_of_the_same_part_takes_its_place(run: DamagedRun, capsys: pytest.CaptureFixture[str]) -> None:
    path = run.part(run.member(6))
    other = path.with_name(path.name[:-32] + "e" * 32)
    other.write_bytes(path.read_bytes())
    before = run.files()
    empty(path)
    status, damages = repaired(run, capsys, "--yes")
    assert (status, [one["remedy"] for one in damages]) == (0, ["restore"])
    assert run.files() == before


def test_a_lost_delta_of_the_past_is_let_go_only_if_told(run: DamagedRun, capsys: pytest.CaptureFixture[str]) -> None:
    path = run.part(run.member(3))
    spoil(path)
    assert called(run, "verify") == 1
    before = run.files()
    status, damages = repaired(run, capsys, "--yes")
    assert (status, [one["remedy"] for one in damages]) == (1, ["none"])
    assert "backup" in damages[0]["detail"]
    assert run.files() == before
    assert repaired(run, capsys, "--yes", "--give-up")[0] == 0
    assert called(run, "verify") == 0
    assert repaired(run, capsys) == (0, [])


def test_what_the_newest_versions_need_is_never_let_go(run: DamagedRun, capsys: pytest.CaptureFixture[str]) -> None:
    lose(run.part(run.member(6)))
    lose(run.update(6))  # which could only be made again from that part
    status, damages = repaired(run, capsys, "--yes", "--give-up")
    assert (status, {one["remedy"] for one in damages}) == (1, {"none"})
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


def test_an_export_after_a_collection_names_it_and_what_is_left(
    run: DamagedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(run, "gc", "--keep-versions", "2", "--keep-since", "0s", "--yes", "--json") == 0
    assert json.loads(capsys.readouterr().out)["objects"]
    out, left = tmp_path / "out.safetensors", run.version(4).position
    with pytest.raises(ObjectMissingError) as refused:
        called(run, "export", "--out", str(out), "--position", str(run.version(3).position))
    assert f"the entry at position {run.position + 1}" in str(refused.value)
    assert f"positions_left={left} to {run.position + 1}" in str(refused.value)
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


async def test_what_a_collection_takes_meanwhile_is_not_damaged(run: DamagedRun) -> None:
    mine, other = store_of(run, 3), store_of(run, 4)
    log = await mine.open_log("run", "0" * 32)
    went = await collect(await other.open_log("run", "0" * 32), Retention(version_count=1), now_unix_s=0.0)
    assert went.victims
    entropy = SeededEntropy(random.Random(5))
    work = Repair(
        log, workers=InlineWorkers(), scratch=Scratch(None), entropy=entropy, may_append=True, acts=True, gives_up=True
    )
    assert await work.run() == []
    for store in (mine, other):
        await store.close()
