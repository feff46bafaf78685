"""What a run's policy keeps: versions whole, hours and days by their weights, pins for ever, and the rest goes."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest

from skerry.runtime.workers import InlineWorkers
from skerry.wire.policy import Policy
from skerry_syncer.store.errors import ObjectMissingError
from skerry_syncer.store.log import retention
from skerry_syncer.store.log.checkpoints import checkpoint_of
from skerry_syncer.store.log.entries import CollectedItem, Item, PolicyItem, SessionItem
from skerry_syncer.store.log.fold import apply_entry
from skerry_syncer.store.log.retention import has_weights_at
from skerry_syncer.store.log.run_log import RunLog
from skerry_syncer.store.log.saved import state_from_bytes, state_to_bytes
from skerry_syncer.store.log.state import RunState
from skerry_syncer.store.maintenance.checking import verify_run
from skerry_syncer.store.maintenance.collecting import collect, plan_collection
from skerry_syncer.store.store import Store
from skerry_syncer.store.versions.replay import Replayer
from skerry_syncer.store.versions.run import Run
from skerry_syncer.store.versions.scratch import Scratch
from tests.support.merge_driver import FRAGMENT, INT4, Driver, layout_of
from tests.support.seeded_entropy import SeededEntropy

HOUR_S = 3600.0
BEGIN_S = 1_700_000_000.0 // 86_400 * 86_400  # a midnight


@dataclass
class Calendar:
    """A clock that a test sets; what it takes for the time of day may be wrong."""

    now_s: float = BEGIN_S
    error_s: float = 0.0

    def unix_s(self) -> float:
        return self.now_s + self.error_s

    def monotonic_s(self) -> float:
        return self.now_s

    async def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s


class Trained:
    """A run that has a version every three hours and a snapshot after every third, followed by one that forgets."""

    def __init__(self, driver: Driver, calendar: Calendar) -> None:
        self.driver = driver
        self.calendar = calendar
        self.positions: list[int] = []  # at which each version was the newest
        self.forgetful = RunState(driver.log.spec, forgets=True)

    @classmethod
    async def start(cls, policy: Policy) -> "Trained":
        calendar = Calendar()
        driver = await Driver.start(layout_of((4, 4), (3,)), Policy(update_encoding=INT4), clock=calendar)
        made = cls(driver, calendar)
        await made.append(PolicyItem("retention", policy))
        return made

    @property
    def log(self) -> RunLog:
        return self.driver.log

    def restart(self) -> None:
        """Goes on as a process that has just opened the log."""
        self.driver.run = Run(
            self.log.objects,
            self.log.spec,
            clock=self.calendar,
            entropy=self.log.entropy,
            workers=InlineWorkers(),
            writer="again",
            state=self.log.state,
        )

    async def append(self, *items: Item) -> None:
        await self.driver.append(*items)
        await self.follow()

    async def follow(self) -> None:
        async for entry, data in self.log.entries(self.forgetful.position + 1):
            outcomes = apply_entry(self.forgetful, entry, data)
            assert all(one.rejection is None for one in outcomes)

    async def train(self, round_count: int, *, is_checkpointed: bool = True) -> None:
        values = np.random.Generator(np.random.PCG64(0))
        for _ in range(round_count):
            self.calendar.now_s += 3 * HOUR_S
            await self.driver.round([await self.driver.push(0, 0.01 * values.standard_normal(19))])
            self.positions.append(self.log.state.position)
            if len(self.positions) % 3 == 0:
                await self.driver.snapshot()
            if is_checkpointed:
                await self.checkpoint()

    async def checkpoint(self) -> None:
        await self.follow()
        item, _ = checkpoint_of(self.forgetful, SeededEntropy(random.Random(self.log.state.position)))
        await self.append(item)

    async def collect(self) -> set[str]:
        plan = partial(plan_collection, self.log, self.log.state.policy, litter_before_unix_s=0.0)
        went = await collect(self.log, plan)
        await self.follow()
        return {victim.name for victim in went.victims}

    async def readable(self) -> set[int]:
        """Returns the versions whose weights can be made."""
        replayer = Replayer(self.driver.run, FRAGMENT, InlineWorkers())
        found = set()
        for version in self.log.state.fragments[FRAGMENT].versions:
            try:
                await replayer.weights_at(version)
            except ObjectMissingError:
                continue
            found.add(version)
        return found


async def test_the_newest_stay_whole_and_hours_and_days_by_their_weights() -> None:
    run = await Trained.start(Policy(update_encoding=INT4, kept_version_count=2, kept_hours=10, kept_day_count=2))
    await run.train(34)  # version 8 is the first of day 2: versions 8n - 1 are the last of a day
    await run.collect()
    readable = await run.readable()
    assert {31, 32, 33, 34} <= readable, "the newest of the last ten hours"
    assert {30, 23, 15} <= readable, "what leads to them, and the last of two days before"
    assert not readable & {1, 2, 7, 8, 16, 20, 24, 25, 26}
    assert readable == {number for number in readable if has_weights_at(run.forgetful, run.positions[number - 1])}
    for version in (33, 34):
        await Replayer(run.driver.run, FRAGMENT, InlineWorkers()).rebuild(version, Scratch(None))
    report = await verify_run(run.driver.run, workers=InlineWorkers(), scratch=Scratch(None))
    assert report.problems == ()


async def _readable_after(errors_s: Sequence[float], *, is_restarted: bool) -> set[int]:
    """Returns the versions that are left of a run in which the calendar was so wrong when each was made."""
    run = await Trained.start(Policy(update_encoding=INT4, kept_version_count=1, kept_hours=6, kept_day_count=2))
    for number, error_s in enumerate(errors_s):
        run.calendar.error_s = error_s
        if is_restarted:
            run.restart()
        await run.train(1, is_checkpointed=number % 2 == 0)
    await run.collect()
    return await run.readable()


@pytest.mark.parametrize("hours", [2, -2, 50, -50])
@pytest.mark.parametrize("is_restarted", [False, True], ids=["one process", "restarted each time"])
@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda number: number % 2, id="one replica of two"),
        pytest.param(lambda number: number == 25, id="the newest entry"),
        pytest.param(lambda number: number < 25, id="all but the newest entry"),
        pytest.param(lambda number: number > 20, id="the clock is set"),
        pytest.param(lambda number: number, id="another clock each time"),
    ],
)
async def test_what_stays_does_not_depend_on_calendar_clocks(
    hours: int, wrong: Callable[[int], int], *, is_restarted: bool
) -> None:
    errors_s = [hours * HOUR_S * wrong(number) for number in range(26)]
    readable = await _readable_after(errors_s, is_restarted=is_restarted)
    assert {24, 25, 26} <= readable, "what was the newest within six hours"
    assert readable == await _readable_after([0.0] * 26, is_restarted=False)


async def test_what_a_new_process_makes_is_not_as_old_as_one_that_waited_for_hours_has_waited() -> None:
    run = await Trained.start(Policy(update_encoding=INT4, kept_version_count=1, kept_hours=4, kept_day_count=0))
    waiting = await Store(
        run.driver.objects,
        clock=run.calendar,
        entropy=SeededEntropy(random.Random(2)),
        workers=InlineWorkers(),
        writer="waiting",
    ).open_run("run", "0" * 32)
    run.calendar.now_s += 100 * HOUR_S
    run.restart()
    await run.train(3, is_checkpointed=False)
    await waiting.log.append([SessionItem("late", "another", "here")])
    await run.log.tail()
    await run.train(1, is_checkpointed=False)
    await run.collect()
    assert {2, 3, 4} <= await run.readable()


async def test_a_pin_outlives_every_collection_and_any_number_of_checkpoints() -> None:
    run = await Trained.start(Policy(update_encoding=INT4, kept_version_count=1, kept_hours=0, kept_day_count=0))
    await run.train(5, is_checkpointed=False)
    pinned = replace(run.log.state.policy, pinned_positions=(run.positions[4],))
    await run.append(PolicyItem("pin", pinned))
    for _ in range(4):
        await run.train(8)
        await run.collect()
    assert {3, 4, 5} <= await run.readable(), "version 5 comes of the snapshot of version 3"
    assert 2 not in await run.readable()
    assert run.forgetful.fragments[FRAGMENT].at(run.positions[4]) is not None
    assert run.forgetful.fragments[FRAGMENT].at(run.positions[5]) is None, "which followed it"
    names = sorted(retention.pinned_names(run.forgetful))
    assert names == sorted(retention.pinned_names(run.log.state))
    (outcome,) = await run.log.append([CollectedItem((names[0],))])
    assert outcome.rejection is not None
    assert outcome.rejection.reason == "BAD_REQUEST"


async def test_what_is_gone_cannot_be_pinned() -> None:
    run = await Trained.start(Policy(update_encoding=INT4, kept_version_count=1, kept_hours=0, kept_day_count=0))
    await run.train(9, is_checkpointed=False)
    await run.collect()
    for position in (run.positions[3], run.log.state.position + 5, 0):
        (outcome,) = await run.log.append([PolicyItem(f"pin {position}", Policy(pinned_positions=(position,)))])
        assert outcome.rejection is not None
        assert outcome.rejection.reason == "VERSION_NOT_FOUND"
    await run.append(PolicyItem("pin", Policy(pinned_positions=(run.positions[8],))))


async def test_forgetting_and_remembering_states_keep_the_same() -> None:
    run = await Trained.start(Policy(update_encoding=INT4, kept_version_count=2, kept_hours=7, kept_day_count=3))
    for _ in range(8):
        await run.train(7)
        await run.collect()
        ours, theirs = run.forgetful.fragments[FRAGMENT], run.log.state.fragments[FRAGMENT]
        assert ours.known().keys() == theirs.known().keys()
        kept = run.log.state.policy
        assert retention.kept_positions(run.forgetful, kept) == retention.kept_positions(run.log.state, kept)
        live = set(run.driver.objects.objects)  # type: ignore[attr-defined]  # objects in a dict
        names = retention.kept_names(run.forgetful, kept)
        assert {f"{run.log.prefix}/{name}" for name in names} <= live
        again = state_from_bytes(state_to_bytes(run.forgetful), run.log.spec)
        assert again.fragments[FRAGMENT].known() == ours.known()


async def test_a_collection_is_due_when_it_frees_a_quarter_of_what_stays() -> None:
    run = await Trained.start(Policy(update_encoding=INT4, kept_version_count=2, kept_hours=0, kept_day_count=0))
    await run.train(3)
    assert not retention.is_due(run.log.state)
    await run.train(9)
    assert retention.is_due(run.log.state)
    assert await run.collect()
    assert not retention.is_due(run.log.state)
    assert not await run.collect()
