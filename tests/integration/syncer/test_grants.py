"""How much a learner may weigh where its enrolment says it: in a close, and from a certificate to the log."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.algorithm.rounds import Brought, most_weights
from skerry.v1 import runs_pb2 as runs
from skerry.wire.policy import Policy
from skerry_syncer.rounds.engine import RoundEngine
from skerry_syncer.server import SyncerServer, serving
from skerry_syncer.store.log.entries import GRANTS_FORMAT, LevelItem, PolicyItem, SessionItem
from skerry_syncer.store.log.state import Outcome
from skerry_syncer.store.maintenance.log_lines import entry_lines
from skerry_syncer.store.objects.opening import open_objects
from tests.integration.syncer.conftest import LOCAL
from tests.integration.syncer.test_liars import MOST, round_of
from tests.support.made_keys import make_keys, tls_of
from tests.support.raw_learner import RawLearner, connected, create_run
from tests.unit.syncer.rounds.round_world import RoundWorld, view

CAP = 2.0
WEIGHTS = st.floats(0, 1e12)
OTHERS = st.lists(st.builds(Brought, WEIGHTS, st.floats(1, 1000)), max_size=8)
FIVE = ("eu", "us", "ap", "big", "liar")


def most_weight(others: Sequence[Brought], *, grant: float, weight_cap: float) -> float:
    brought = {str(at): one for at, one in enumerate(others)} | {"own": Brought(3.0, grant)}
    return most_weights(brought, weight_cap=weight_cap)["own"]


def most(others: Sequence[float], grant: float = CAP) -> float:
    return most_weight([Brought(weight, CAP) for weight in others], grant=grant, weight_cap=CAP)


def test_the_bound_by_hand() -> None:
    assert most([1, 1, 1]) == 2
    assert most([1, 1, 1], 8) == 8
    assert most([8, 8, 1, 1]) == 9
    large = [Brought(8, 8), Brought(8, 8), Brought(1, CAP), Brought(1, CAP)]
    assert most_weight(large, grant=CAP, weight_cap=CAP) == 3, "each of the large ones counts as 2"
    assert most_weight(large[1:], grant=8, weight_cap=CAP) == 8
    small = [Brought(1, 1), Brought(1, 1)]
    assert most_weight(small, grant=CAP, weight_cap=CAP) == 2, "a small grant raises nobody's bound"


@given(st.lists(WEIGHTS, min_size=2, max_size=8), st.floats(1, 1000))
def test_without_grants_the_bound_is_the_cap_times_the_median_to_the_bit(others: list[float], cap: float) -> None:
    alike = [Brought(weight, cap) for weight in others]
    assert most_weight(alike, grant=cap, weight_cap=cap) == cap * statistics.median(others)


@given(OTHERS, st.floats(1, 1000), st.floats(1, 1000))
def test_one_of_three_others_or_more_raises_a_bound_to_what_the_rest_allows_at_most(
    others: list[Brought], claim_grant: float, grant: float
) -> None:
    liar = Brought(1e300, claim_grant)
    bound = most_weight([*others, liar], grant=grant, weight_cap=CAP)
    if len(others) < 2:
        assert bound == math.inf or len(others) == 1
        return
    assert bound <= grant * max(other.weight for other in others)


@given(st.lists(st.floats(1, 1000), min_size=3, max_size=8), st.floats(1e-3, 1e9))
def test_learners_as_large_as_they_were_granted_all_count_in_full(sizes: list[float], usual: float) -> None:
    """A size of up to the cap needs no grant."""
    learners = [Brought(size * usual, max(size, CAP)) for size in sizes]
    for at, own in enumerate(learners):
        others = [*learners[:at], *learners[at + 1 :]]
        assert own.weight <= most_weight(others, grant=own.grant, weight_cap=CAP) * (1 + 1e-9)


def test_the_bounds_of_thousands_take_no_time() -> None:
    """Rounds ask for them at each report, on the event loop."""
    brought = {str(at): Brought(float(at % 97), CAP) for at in range(4000)}
    begun_s = time.process_time()
    most_weights(brought, weight_cap=CAP)
    assert time.process_time() - begun_s < 1


def test_beside_a_large_learner_the_usual_ones_are_waited_for() -> None:
    names = ("eu", "us", "ap", "uk", "big")
    world = world_of(*names)
    for learner in names:
        world.accept(learner, tokens=2400 * (8 if learner == "big" else 1))
    world.close_and_commit(round_of(world, *names))
    world.accept("big", tokens=8 * 2400)
    assert RoundEngine().decide(world.state, view(*names), 0.0).items == ()


def world_of(*learners: str, level: int = GRANTS_FORMAT) -> RoundWorld:
    """Returns a run in which `big` is granted 8."""
    world = RoundWorld(*learners)
    world.append(LevelItem(level))
    world.append(SessionItem("big", "session-big", "here", weight=8.0))
    return world


def weights_of(world: RoundWorld, **tokens: int) -> dict[str, float]:
    """Returns what each learner counts in a round with so many tokens of each, in those of a usual delta."""
    for learner, count in tokens.items():
        world.accept(learner, tokens=count)
    close = world.close_and_commit(round_of(world, *tokens))
    return {world.state.deltas[member.delta].item.learner: member.weight / 2400 for member in close.members}


@pytest.mark.parametrize(("brings", "counts"), [(1, 1), (8, 8), (64, 8), (MOST, 8)])
def test_who_was_granted_8_counts_for_8_times_the_median_at_most(brings: int, counts: float) -> None:
    world = world_of("eu", "us", "ap", "big")
    found = weights_of(world, eu=2400, us=2400, ap=2400, big=2400 * brings)
    assert found == {"eu": 1, "us": 1, "ap": 1, "big": pytest.approx(counts)}


def test_who_was_granted_nothing_counts_for_the_cap_beside_one_that_was() -> None:
    for _ in range(2):  # also once it is known what each brought
        found = weights_of(world_of(*FIVE), eu=2400, us=2400, ap=2400, big=8 * 2400, liar=MOST)
        assert found == {"eu": 1, "us": 1, "ap": 1, "big": pytest.approx(8), "liar": pytest.approx(2)}


def test_two_large_learners_give_a_small_one_no_room_for_a_lie() -> None:
    world = world_of("eu", "big", "large", "liar")
    world.append(SessionItem("large", "session-large", "here", weight=8.0))
    found = weights_of(world, eu=2400, big=8 * 2400, large=8 * 2400, liar=MOST)
    assert found == {"eu": 1, "big": 8, "large": 8, "liar": pytest.approx(4)}


def test_an_absent_learner_counts_with_no_more_than_it_was_granted() -> None:
    world = world_of("eu", "us", "ap", "big")
    weights_of(world, eu=2400, us=2400, ap=2400, big=MOST)
    for learner in ("eu", "us", "ap"):
        world.accept(learner)
    assert round_of(world, "eu", "us", "ap", "big").participation == pytest.approx(3 / 11)


def test_below_its_level_a_grant_counts_for_nothing() -> None:
    found = weights_of(world_of("eu", "us", "ap", "big", level=4), eu=2400, us=2400, ap=2400, big=64 * 2400)
    assert found["big"] == pytest.approx(2)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", "--server", "a.example", "--learner", "us", "--admin", "anna")
    make_keys(tmp_path / "keys", "--learner", "demo/big", "--weight", "8")
    return tmp_path / "keys"


@pytest.fixture
async def server(keys: Path) -> AsyncIterator[SyncerServer]:
    async with serving(open_objects("memory://"), replace(LOCAL, tls=tls_of(keys, "a.example"))) as started:
        yield started


async def sessions(server: SyncerServer) -> list[tuple[str, float | None, str]]:
    """Returns of each session item in the log its learner, its weight, and how what `skerry log` says of it ends."""
    found = []
    async for entry, data in (await server.host.open("demo")).log.entries():
        lines = entry_lines(entry, tuple(Outcome(item, None) for item in entry.items))
        for item, (*_, what, _) in zip(entry.items, lines, strict=True):
            if isinstance(item, SessionItem):
                assert (b"weight" in data) == (item.weight is not None), "an old item keeps its bytes"
                found.append((item.learner, item.weight, what.partition(", session ")[2][8:]))
    return found


async def test_what_a_certificate_grants_is_in_the_log_and_follows_the_certificate(
    server: SyncerServer, keys: Path
) -> None:
    async with connected(server.port, tls_of(keys, "us")) as stubs:
        run, _ = await create_run(stubs)
        await RawLearner(stubs, run, "us", random.Random(1)).attach()
    async with connected(server.port, tls_of(keys, "demo.big")) as stubs:
        big = RawLearner(stubs, run, "big", random.Random(2))
        for _ in range(2):
            await big.attach()
    assert await sessions(server) == [("us", None, ""), ("big", 8.0, ", weight 8")]
    make_keys(keys, "--learner", "demo/big", "--weight", "2.5", "--renew")
    async with connected(server.port, tls_of(keys, "demo.big")) as stubs:
        big.stubs = stubs
        await big.attach()
    assert (await sessions(server))[2:] == [("big", 2.5, ", weight 2.5")]
    assert (await server.host.open("demo")).state.grants == {"big": 2.5}


async def test_a_run_of_an_older_level_grants_nothing_until_it_is_upgraded(keys: Path) -> None:
    host = replace(LOCAL.host, new_run_level=GRANTS_FORMAT - 1)
    settings = replace(LOCAL, host=host, tls=tls_of(keys, "a.example"))
    async with (
        serving(open_objects("memory://"), settings) as server,
        connected(server.port, tls_of(keys, "anna")) as admin,
        connected(server.port, tls_of(keys, "demo.big")) as stubs,
    ):
        run, _ = await create_run(admin)
        big = RawLearner(stubs, run, "big", random.Random(1))
        await big.attach()
        await admin.runs.UpgradeRun(runs.UpgradeRunRequest(name="demo"))
        await big.attach()
        assert await sessions(server) == [("big", None, ""), ("big", 8.0, ", weight 8")]


def test_a_run_says_whom_it_enrols_from_its_format_level_on() -> None:
    world = RoundWorld("eu")
    (outcome,) = world.append(PolicyItem("e" * 32, Policy(enrols_by_run=True)))
    assert outcome.rejection is not None
    assert outcome.rejection.reason == "BAD_REQUEST"
    world.append(LevelItem(GRANTS_FORMAT))
    (outcome,) = world.append(PolicyItem("e" * 32, Policy(enrols_by_run=True)))
    assert outcome.rejection is None
    assert world.state.policy.enrols_by_run


@pytest.mark.parametrize("field", ["quorum_count", "kept_hours", "lease_term_s", "enrols_by_run"])
def test_no_field_of_a_policy_is_null(field: str) -> None:
    with pytest.raises(ValueError, match="policy"):
        Policy.from_json({field: None})


@pytest.mark.parametrize("value", [0, 1, 0.5, "true", None])
def test_a_policy_says_so_by_true_or_false(value: object) -> None:
    with pytest.raises(ValueError, match="true or false"):
        Policy.from_json({"enrols_by_run": value})
