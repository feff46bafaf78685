"""Opening a run from its newest log checkpoint, and what happens where that is lost or damaged."""

import json
from collections.abc import Callable

import pytest

from skerry_syncer.store.log.checkpoints import (
    CHECKPOINT_EVERY,
    KEPT_CHECKPOINTS,
    checkpoint_of,
    is_due,
    newest_state,
    state_to_bytes,
    write_checkpoint,
)
from skerry_syncer.store.log.entries import Entry, RunSpec, entry_name, run_prefix
from skerry_syncer.store.log.fold import apply_entry
from skerry_syncer.store.log.state import RunState
from tests.simulation.virtual_time import run_virtual
from tests.support.log_bench import Bench
from tests.support.long_log import RUN, UID, Synthesis

ENTRIES = 2 * CHECKPOINT_EVERY + 300
PREFIX = run_prefix(RUN, UID)


class LongRun:
    """A run with two checkpoints, in a bench's store."""

    def __init__(self) -> None:
        self.bench = Bench()
        objects = self.bench.shared.objects
        made = Synthesis(lambda name, data: objects.update({name: (data, 0.0)}), fragment_count=2, learner_count=2)
        made.grow(ENTRIES)
        self.spec, self.objects = made.spec, objects
        self.checkpoints = sorted(name for name in objects if "/checkpoints/" in name)
        assert len(self.checkpoints) == 2

    def folded(self) -> RunState:
        """Returns the fold of all entries."""
        state = RunState(self.spec)
        while (found := self.objects.get(entry_name(PREFIX, state.position + 1))) is not None:
            apply_entry(state, Entry.from_bytes(found[0]), found[0])
        return state

    def open(self) -> tuple[RunState, int]:
        """Opens the run in a fresh process; returns its state, and how many objects were read."""

        async def work() -> RunState:
            return (await self.bench.store().open_run(RUN, UID)).state

        before = self.bench.operations["get"]
        return run_virtual(work), self.bench.operations["get"] - before


@pytest.fixture(scope="module")
def made() -> LongRun:
    return LongRun()


@pytest.fixture
def run(made: LongRun) -> LongRun:
    fresh = LongRun.__new__(LongRun)
    fresh.__dict__.update(made.__dict__)
    fresh.bench = Bench()
    fresh.bench.shared.objects.update(made.objects)
    fresh.objects = fresh.bench.shared.objects
    return fresh


def change(run: LongRun, name: str, damage: Callable[[bytes], bytes]) -> None:
    run.objects[name] = (damage(run.objects[name][0]), 0.0)


def test_a_run_is_opened_from_its_newest_checkpoint_and_the_entries_after_it(run: LongRun) -> None:
    state, read_count = run.open()
    assert state_to_bytes(state) == state_to_bytes(run.folded())
    assert read_count < ENTRIES - 2 * CHECKPOINT_EVERY + 200


def test_what_is_remembered_does_not_grow_with_the_log(run: LongRun) -> None:
    assert len(run.open()[0].deltas) < ENTRIES / 6, "of about a third of the entries"


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2] + b"\x00" + data[len(data) // 2 + 1 :],
        lambda data: json.dumps(json.loads(data) | {"position": 7}).encode(),
        None,
    ],
    ids=["empty", "cut", "flipped", "another state", "lost"],
)
def test_a_lost_or_damaged_checkpoint_is_passed_over(run: LongRun, damage: Callable[[bytes], bytes] | None) -> None:
    expected = state_to_bytes(run.folded())
    for count, name in enumerate(reversed(run.checkpoints), 1):
        if damage is None:
            del run.objects[name]
        else:
            change(run, name, damage)
        state, read_count = run.open()
        assert state_to_bytes(state) == expected
        assert read_count > count * CHECKPOINT_EVERY


def test_a_checkpoint_that_no_entry_names_is_not_used(run: LongRun) -> None:
    expected = run.folded()
    lie = RunState(run.spec)
    lie.position, lie.head_digest = expected.position, expected.head_digest
    item, data = checkpoint_of(lie, run.bench.entropy)
    run.objects[f"{PREFIX}/{item.name}"] = (data, 0.0)
    run.objects[f"{PREFIX}/checkpoints/not a checkpoint"] = (b"", 0.0)
    assert state_to_bytes(run.open()[0]) == state_to_bytes(expected)


def test_a_log_that_was_cut_before_its_checkpoint_is_read_as_it_is(run: LongRun) -> None:
    for position in range(CHECKPOINT_EVERY // 2, ENTRIES + 100):
        run.objects.pop(entry_name(PREFIX, position), None)
    assert run.open()[0].position == CHECKPOINT_EVERY // 2 - 1


def test_the_state_before_a_position_comes_from_the_checkpoint_before_it(run: LongRun) -> None:
    async def at(position: int) -> int:
        return (await newest_state(run.bench.shared, run.spec, at_most=position)).position

    first, second = (int(name.rpartition("/")[2].partition("-")[0]) for name in run.checkpoints)
    for asked, found in ((first - 1, 0), (first, first), (second - 1, first), (second, second), (ENTRIES, second)):
        assert run_virtual(lambda asked=asked: at(asked)) == found  # type: ignore[misc]


def test_two_replicas_that_write_a_checkpoint_at_once_leave_one(run: LongRun) -> None:
    async def work() -> RunSpec:
        first, second = [(await run.bench.store().open_run(RUN, UID)).log for _ in range(2)]
        for log in (first, second):
            assert not is_due(log.state, CHECKPOINT_EVERY)
            assert is_due(log.state, 100)
            await write_checkpoint(log)
        await first.tail()
        assert first.state.checkpoint_at == second.state.checkpoint_at
        return first.spec

    run_virtual(work)
    assert len([name for name in run.objects if "/checkpoints/" in name]) == 3
    assert state_to_bytes(run.open()[0]) == state_to_bytes(run.folded())


def test_old_checkpoints_are_deleted(run: LongRun) -> None:
    async def work() -> None:
        log = (await run.bench.store().open_run(RUN, UID)).log
        for _ in range(KEPT_CHECKPOINTS):
            await log.append([run.bench.policy()])
            await write_checkpoint(log)

    run_virtual(work)
    names = [name for name in run.objects if "/checkpoints/" in name]
    assert len(names) == KEPT_CHECKPOINTS
    assert not set(names) & set(run.checkpoints)
    assert state_to_bytes(run.open()[0]) == state_to_bytes(run.folded())
