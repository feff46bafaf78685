"""What a run's policy keeps, what the fold forgets of the rest, and that nothing late takes effect because of it."""

from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from skerry.wire.policy import Policy
from skerry_syncer.store.errors import ObjectMissingError
from skerry_syncer.store.log.checkpoints import checkpoint_of, state_from_bytes, state_to_bytes
from skerry_syncer.store.log.entries import (
    CheckpointItem,
    CollectedItem,
    Decided,
    Fate,
    FateItem,
    Item,
    PolicyItem,
    SessionItem,
)
from skerry_syncer.store.log.retention import (
    LEAST_VERSIONS,
    REMEMBERED_REQUESTS,
    REMEMBERED_SESSIONS,
    has_weights_at,
    is_due,
    oldest_versions,
    pinned_names,
)
from skerry_syncer.store.log.run_log import RunLog
from skerry_syncer.store.maintenance.collecting import collect, plan_collection
from skerry_syncer.store.versions.scratch import Scratch
from tests.support.history import (
    BODY,
    EMBED,
    SPEC,
    History,
    accepted,
    closed,
    committed,
    committed_round,
    rolled_back,
    snapshot,
)
from tests.support.merge_driver import FRAGMENT, INT4, Driver, layout_of
from tests.support.still_clock import StillClock

HOUR_S = 3600.0


class Trained:
    """A run that has a version every three hours and a snapshot after every third."""

    def __init__(self, driver: Driver, clock: StillClock) -> None:
        self.driver = driver
        self.clock = clock
        self.positions: list[int] = []  # at which each version was the newest

    @classmethod
    async def start(cls, *, versions: int = 1, hours: float = 0, days: int = 0) -> "Trained":
        """Keeps so many versions whole, and the weights of so many hours and days."""
        kept = Policy(update_encoding=INT4, kept_version_count=versions, kept_hours=hours, kept_day_count=days)
        clock = StillClock()
        return cls(await Driver.start(layout_of((4, 4), (3,)), kept, clock=clock), clock)

    @property
    def log(self) -> RunLog:
        return self.driver.log

    async def train(self, round_count: int, *, is_checkpointed: bool = True) -> None:
        values = np.random.Generator(np.random.PCG64(0))
        for _ in range(round_count):
            self.clock.now_s += 3 * HOUR_S
            await self.driver.round([await self.driver.push(0, 0.01 * values.standard_normal(19))])
            self.positions.append(self.log.state.position)
            if len(self.positions) % 3 == 0:
                await self.driver.snapshot()
            if is_checkpointed:
                item, _ = checkpoint_of(self.log.state, self.log.entropy)
                await self.driver.append(item)

    async def collect(self) -> int:
        """Returns how many objects went."""
        plan = await plan_collection(self.log, self.log.state.policy, litter_before_unix_s=0.0)
        return len((await collect(self.log, plan)).victims)

    async def refused(self, item: Item) -> str:
        """Appends an item that must have no effect; returns why."""
        (outcome,) = await self.log.append([item])
        assert outcome.rejection is not None
        return outcome.rejection.reason

    async def readable(self) -> set[int]:
        """Returns the versions whose weights can be made."""
        replayer = self.driver.replayer()
        readable = set()
        for version in self.log.state.fragments[FRAGMENT].versions:
            with suppress(ObjectMissingError):
                await replayer.weights_at(version)
                readable.add(version)
        return readable


async def test_the_newest_stay_whole_and_hours_and_days_by_their_weights() -> None:
    run = await Trained.start(versions=2, hours=10, days=2)
    await run.train(34)  # version 8 is the first of day 2: versions 8n - 1 are the last of a day
    with pytest.raises(ObjectMissingError):  # of which only the weights are known
        await run.driver.replayer().rebuild(23, Scratch(None))
    await run.collect()
    readable = await run.readable()
    assert {31, 32, 33, 34} <= readable, "the newest of the last ten hours"
    assert {30, 23, 15} <= readable, "what leads to them, and the last of two days before"
    assert not readable & {1, 2, 7, 8, 16, 20, 24, 25, 26}
    assert readable == {number for number in readable if has_weights_at(run.log.state, run.positions[number - 1])}
    for version in (33, 34):
        await run.driver.replayer().rebuild(version, Scratch(None))
    assert (await run.driver.verify()).problems == ()


async def test_a_pin_outlives_every_collection_and_any_number_of_checkpoints() -> None:
    run = await Trained.start()
    await run.train(5, is_checkpointed=False)
    pinned = replace(run.log.state.policy, pinned_positions=(run.positions[4],))
    await run.driver.append(PolicyItem("pin", pinned))
    for _ in range(4):
        await run.train(8)
        await run.collect()
    readable = await run.readable()
    assert {3, 4, 5} <= readable, "version 5 comes of the snapshot of version 3"
    assert 2 not in readable
    state = run.log.state
    assert state.fragments[FRAGMENT].at(run.positions[4]) is not None
    assert state.fragments[FRAGMENT].at(run.positions[5]) is None, "which followed it"
    assert await run.refused(CollectedItem((min(pinned_names(state)),))) == "BAD_REQUEST"
    again = state_from_bytes(state_to_bytes(state), run.log.spec)
    assert again.fragments == state.fragments


async def test_what_is_gone_cannot_be_pinned() -> None:
    run = await Trained.start()
    await run.train(9, is_checkpointed=False)
    await run.collect()
    for position in (run.positions[3], run.log.state.position + 5, 0):
        pin = PolicyItem(f"pin {position}", Policy(pinned_positions=(position,)))
        assert await run.refused(pin) == "VERSION_NOT_FOUND"
    await run.driver.append(PolicyItem("pin", Policy(pinned_positions=(run.positions[8],))))


async def test_a_collection_is_due_when_it_frees_a_quarter_of_what_stays_and_the_kept_versions_stay_whole() -> None:
    run = await Trained.start(versions=2)
    await run.train(3)
    assert not is_due(run.log.state)
    await run.train(9)
    assert is_due(run.log.state)
    assert await run.collect()
    for version in (11, 12):  # of which the newer has a snapshot, and needs nothing of the older
        await run.driver.replayer().rebuild(version, Scratch(None))
    assert not is_due(run.log.state)
    assert not await run.collect()


VERSIONS = 12


def checkpoint(history: History, **oldest: int) -> CheckpointItem:
    position = history.state.position
    return CheckpointItem(position, f"checkpoints/{position:020}-{'0' * 32}", 1, "0" * 64, oldest)


@pytest.fixture
def history() -> History:
    """An open run with versions 0 to 12 of one fragment, a delta of m0 in each and a snapshot."""
    made = History.opened()
    for version in range(1, VERSIONS + 1):
        if version == 1:
            made.admit(accepted("of m1", "m1"))
        made.admit(accepted(f"d{version}", base=version - 1))
        committed_round(made, *(["of m1"] if version == 1 else []), f"d{version}", version=version)
        made.admit(snapshot(version))
    return made


def test_older_versions_and_what_went_into_them_are_forgotten(history: History) -> None:
    before = len(state_to_bytes(history.state))
    history.admit(checkpoint(history, body=8))
    remembered = list(range(8, VERSIONS + 1))
    assert list(history.state.fragments[BODY].versions) == remembered
    assert list(history.state.deltas) == ["of m1", *(f"d{version}" for version in remembered)]
    assert len(state_to_bytes(history.state)) < 0.7 * before


def test_a_late_repeat_of_a_forgotten_delta_is_refused_by_its_base(history: History) -> None:
    assert history.reject(accepted("d3", base=2)) == "REPEATED"
    history.admit(checkpoint(history, body=8))
    assert history.reject(accepted("d3", base=2)) == "BASE_STALE"
    assert history.reject(accepted("another id", base=2)) == "BASE_STALE"
    assert history.reject(accepted("of m1", "m1")) == "REPEATED", "the last delta of a learner is remembered"
    assert history.state.deltas["of m1"].fate is Fate.MERGED


def test_a_learners_last_delta_is_forgotten_when_another_follows_it(history: History) -> None:
    history.admit(checkpoint(history, body=8))
    history.admit(accepted("next of m1", "m1", base=VERSIONS))
    history.admit(checkpoint(history, body=9))
    assert history.reject(accepted("of m1", "m1")) == "BASE_STALE"
    assert "of m1" not in history.state.deltas


def test_an_expired_delta_is_remembered_while_its_base_is(history: History) -> None:
    history.admit(accepted("given up", "m1", base=9))
    history.admit(FateItem((Decided("given up", Fate.EXPIRED, "why not"),)))
    history.admit(accepted("again", "m1", base=9))
    history.admit(checkpoint(history, body=9))
    assert history.reject(accepted("given up", "m1", base=9)) == "REPEATED"
    history.admit(FateItem((Decided("again", Fate.EXPIRED, "why not"),)))
    history.admit(checkpoint(history, body=10))
    assert history.reject(accepted("given up", "m1", base=9)) == "BASE_STALE"


def test_the_base_of_a_pending_or_frozen_delta_is_not_forgotten(history: History) -> None:
    history.admit(accepted("late", "m1", base=5))
    history.admit(checkpoint(history, body=8))
    assert history.state.fragments[BODY].oldest == 5
    history.admit(closed("late", version=VERSIONS + 1))
    history.admit(checkpoint(history, body=8))
    assert history.state.fragments[BODY].oldest == 5
    history.admit(committed(VERSIONS + 1))
    history.admit(checkpoint(history, body=8))
    assert history.state.fragments[BODY].oldest == 8


def test_the_snapshot_that_the_oldest_version_is_rebuilt_from_is_not_forgotten(history: History) -> None:
    names = tuple(f"snapshots/{BODY}/{version}" for version in (6, 7, 8))
    history.admit(CollectedItem(names))
    history.admit(checkpoint(history, body=8))
    assert history.state.fragments[BODY].oldest == 5


def test_the_horizon_never_moves_back_or_past_the_newest_version(history: History) -> None:
    history.admit(checkpoint(history, body=99))
    assert history.state.fragments[BODY].oldest == VERSIONS
    history.admit(checkpoint(history, body=3))
    assert history.state.fragments[BODY].oldest == VERSIONS


def test_what_belongs_to_a_forgotten_version_has_no_effect(history: History) -> None:
    history.admit(CollectedItem((f"snapshots/{BODY}/3",)))
    history.admit(checkpoint(history, body=8))
    assert history.reject(snapshot(4)) == "VERSION_NOT_FOUND"
    assert history.reject(rolled_back("r", 4, VERSIONS + 1)) == "VERSION_NOT_FOUND"
    history.admit(rolled_back("r", 9, VERSIONS + 1))


def test_condemned_names_are_forgotten_with_the_versions_of_their_time(history: History) -> None:
    history.admit(CollectedItem((f"deltas/{BODY}/of a slow push/part", "deltas/embed/of another/part")))
    slow = accepted("of a slow push", base=VERSIONS)
    assert history.reject(slow) == "INCOMPLETE"
    history.admit(checkpoint(history, body=VERSIONS, embed=0))
    assert history.reject(slow) == "INCOMPLETE", "its base may still be pushed from"
    history.admit(accepted("next", "m1", base=VERSIONS))
    committed_round(history, "next", version=VERSIONS + 1)
    history.admit(snapshot(VERSIONS + 1))
    history.admit(checkpoint(history, body=VERSIONS + 1, embed=0))
    assert history.reject(slow) == "BASE_STALE", "its base is forgotten, and its part may be"
    assert list(history.state.condemned) == ["deltas/embed/of another/part"]


def test_old_sessions_and_requests_are_forgotten(history: History) -> None:
    for number in range(REMEMBERED_SESSIONS + 10):
        history.admit(SessionItem("m0", f"session {number}", "here"))
    history.add(*(PolicyItem(f"{number:032x}", Policy()) for number in range(REMEMBERED_REQUESTS + 10)))
    history.admit(checkpoint(history, body=8))
    assert len(history.state.learners["m0"].sessions) == REMEMBERED_SESSIONS
    assert history.reject(SessionItem("m0", "session 20", "here")) == "SESSION_FENCED"
    assert len(history.state.requests) == REMEMBERED_REQUESTS
    assert history.reject(PolicyItem(f"{100:032x}", Policy())) == "ID_REUSED"


def test_a_checkpoint_is_newer_than_the_last_and_of_a_run_that_allows_it(history: History) -> None:
    first = checkpoint(history, body=8)
    history.admit(first)
    assert history.reject(first) == "REPEATED"
    draft = History()
    draft.admit(snapshot(0, EMBED))
    draft.admit(snapshot(0))
    assert draft.reject(checkpoint(draft, body=0)) == "RUN_DRAFT"


def test_a_writer_asks_to_forget_only_what_is_no_base_any_more(history: History) -> None:
    assert oldest_versions(history.state) == {EMBED: 0, BODY: VERSIONS - 9}, "a base may be 8 rounds old"
    history.admit(PolicyItem("p", Policy(max_staleness=11)))
    assert oldest_versions(history.state)[BODY] == 0
    history.admit(PolicyItem("q", Policy(max_staleness=0)))
    assert oldest_versions(history.state)[BODY] == VERSIONS - LEAST_VERSIONS


def test_no_delta_is_looked_at_while_all_versions_are_kept(history: History) -> None:
    history.admit(PolicyItem("p", Policy(kept_version_count=VERSIONS + 1)))
    del history.state.deltas
    assert not is_due(history.state)


def test_the_state_goes_into_bytes_and_back() -> None:
    made = History.opened()
    made.admit(accepted("a"))
    committed_round(made, "a")
    made.admit(accepted("b", base=1))
    made.admit(closed("b", version=2))
    made.admit(accepted("c", "m1", base=1))
    made.admit(CollectedItem(("deltas/body/litter/part",)))
    made.admit(PolicyItem("p", Policy(max_staleness=3)))
    made.admit(checkpoint(made, body=1))
    data = state_to_bytes(made.state)
    again = state_from_bytes(data, SPEC)
    assert state_to_bytes(again) == data
    assert vars(again).keys() == vars(made.state).keys()
    for name, value in vars(made.state).items():
        assert vars(again)[name] == value, name
    assert again.fragments[BODY].pending["c"] is again.deltas["c"]
