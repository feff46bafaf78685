"""Opening a run from its newest log checkpoint, and what happens where that is lost or damaged."""

import random

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
from skerry_syncer.store.log.entries import Entry, entry_name, run_prefix
from skerry_syncer.store.log.fold import apply_entry
from skerry_syncer.store.log.state import RunState
from tests.simulation.virtual_time import run_virtual
from tests.support.history import SPEC, History, accepted, committed_round, snapshot
from tests.support.log_bench import Bench
from tests.support.seeded_entropy import SeededEntropy

ENTRIES = 2 * CHECKPOINT_EVERY + 300
PREFIX = run_prefix(SPEC.name, SPEC.uid)


def make_long_run() -> dict[str, tuple[bytes, float]]:
    """Returns the log of a run with two checkpoints, in which two learners contribute to every round."""
    history, entropy = History.opened(), SeededEntropy(random.Random(0))
    objects = {entry_name(PREFIX, 0): (SPEC.to_bytes(), 0.0)}
    version = 0
    while len(history.entries) < ENTRIES:
        version += 1
        deltas = [f"{learner} of {version}" for learner in ("m0", "m1")]
        for delta in deltas:
            history.admit(accepted(delta, delta[:2], base=version - 1))
        committed_round(history, *deltas, version=version)
        if version % 8 == 0:
            history.admit(snapshot(version))
        if is_due(history.state):
            item, data = checkpoint_of(history.state, entropy)
            objects[f"{PREFIX}/{item.name}"] = (data, 0.0)
            history.admit(item)
    return objects | {entry_name(PREFIX, n): (data, 0.0) for n, data in enumerate(history.entries, 1)}


class LongRun:
    """A long run in a store that may be damaged."""

    def __init__(self, objects: dict[str, tuple[bytes, float]]) -> None:
        self.bench = Bench()
        self.objects = self.bench.shared.objects
        self.objects.update(objects)

    @property
    def checkpoints(self) -> list[str]:
        return sorted(name for name in self.objects if "/checkpoints/" in name)

    def folded(self) -> bytes:
        """Returns the state by the fold of all entries."""
        state = RunState(SPEC)
        while (stored := self.objects.get(entry_name(PREFIX, state.position + 1))) is not None:
            apply_entry(state, Entry.from_bytes(stored[0]), stored[0])
        return state_to_bytes(state)

    def open(self) -> tuple[RunState, int]:
        """Opens the run in a fresh process; returns its state, and how many objects were read."""

        async def work() -> RunState:
            return (await self.bench.store().open_run(SPEC.name, SPEC.uid)).state

        before = self.bench.operations["get"]
        return run_virtual(work), self.bench.operations["get"] - before


@pytest.fixture(scope="module")
def made() -> dict[str, tuple[bytes, float]]:
    return make_long_run()


@pytest.fixture
def run(made: dict[str, tuple[bytes, float]]) -> LongRun:
    return LongRun(made)


def test_a_run_is_opened_from_its_newest_checkpoint_and_the_entries_after_it(run: LongRun) -> None:
    state, read_count = run.open()
    assert state_to_bytes(state) == run.folded()
    assert read_count < ENTRIES - 2 * CHECKPOINT_EVERY + 200
    assert len(state.deltas) < ENTRIES / 6, "of about a third of the entries"


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_lost_or_damaged_checkpoint_is_passed_over(run: LongRun, is_lost: bool) -> None:
    expected = run.folded()
    for count, name in enumerate(reversed(run.checkpoints), 1):
        data, _ = run.objects.pop(name)
        if not is_lost:
            run.objects[name] = (data.replace(b"here", b"away"), 0.0)
        state, read_count = run.open()
        assert state_to_bytes(state) == expected
        assert read_count > count * CHECKPOINT_EVERY


def test_a_checkpoint_that_no_entry_names_is_not_used(run: LongRun) -> None:
    lie, _ = run.open()
    lie.learners.clear()
    item, data = checkpoint_of(lie, run.bench.entropy)
    run.objects[f"{PREFIX}/{item.name}"] = (data, 0.0)
    run.objects[f"{PREFIX}/checkpoints/not a checkpoint"] = (b"", 0.0)
    assert state_to_bytes(run.open()[0]) == run.folded()


def test_a_log_that_was_cut_before_its_checkpoint_is_read_as_it_is(run: LongRun) -> None:
    for position in range(CHECKPOINT_EVERY // 2, ENTRIES + 100):
        run.objects.pop(entry_name(PREFIX, position), None)
    assert run.open()[0].position == CHECKPOINT_EVERY // 2 - 1


def test_the_state_before_a_position_comes_from_the_checkpoint_before_it(run: LongRun) -> None:
    async def at(position: int) -> int:
        return (await newest_state(run.bench.shared, SPEC, at_most=position)).position

    first, second = (int(name.rpartition("/")[2].partition("-")[0]) for name in run.checkpoints)
    for asked, expected in ((first - 1, 0), (first, first), (second - 1, first), (ENTRIES, second)):
        assert run_virtual(lambda asked=asked: at(asked)) == expected  # type: ignore[misc]


def test_two_replicas_that_write_a_checkpoint_at_once_leave_one(run: LongRun) -> None:
    async def work() -> None:
        first, second = [(await run.bench.store().open_run(SPEC.name, SPEC.uid)).log for _ in range(2)]
        for log in (first, second):
            await write_checkpoint(log)
        await first.tail()
        assert first.state.checkpoint_at == second.state.checkpoint_at

    run_virtual(work)
    assert len(run.checkpoints) == 3
    assert state_to_bytes(run.open()[0]) == run.folded()


def test_old_checkpoints_are_deleted(run: LongRun) -> None:
    before = run.checkpoints

    async def work() -> None:
        log = (await run.bench.store().open_run(SPEC.name, SPEC.uid)).log
        for _ in range(KEPT_CHECKPOINTS):
            await log.append([run.bench.policy()])
            await write_checkpoint(log)

    run_virtual(work)
    assert len(run.checkpoints) == KEPT_CHECKPOINTS
    assert not set(run.checkpoints) & set(before)
    assert state_to_bytes(run.open()[0]) == run.folded()
