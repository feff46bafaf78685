"""One fragment's exchange with a scripted syncer: what it sends, what it makes of the answers, and what is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from skerry import Policy, RunClosedError, WorkRefusedError, errors
from skerry.algorithm.rebase import Ledger, Trained
from skerry.errors import error_of
from skerry.exchange.fragment import FragmentExchange
from skerry.exchange.states import Idle, InFlight
from skerry.stats import LastWork
from skerry.v1 import exchange_pb2 as v1
from skerry.v1 import types_pb2
from skerry.wire import FragmentLayout, TensorSpec
from tests.support.decoding import decode_frames
from tests.support.scripted_transport import RAW, ScriptedTransport, accepted, pull_to, quick_calls, scripted_session

LAYOUT = FragmentLayout("f", (TensorSpec("w", (2,)),))
START = [1.0, 2.0]  # version 3
POLICY = Policy(inner_step_count=2, delta_encoding=RAW)
UNREACHABLE = error_of("UNREACHABLE", "no link")


class World:
    """A learner of one fragment that has adopted version 3 and is due after 2 steps of 10 tokens."""

    def __init__(self, dtype: type = np.float32, **scripts: Any) -> None:
        self.weights: NDArray[Any] = np.array(START, dtype)
        self.transport = ScriptedTransport(**scripts)
        self.session = scripted_session(quick_calls(self.transport), {"w": self.weights})
        self.session.policy = POLICY
        start = np.array(START, np.float32)
        ledger = Ledger(3, b"3", start, start)
        self.fragment = FragmentExchange(self.session, LAYOUT, ledger, contributed_step=0, restore_all=self.restore)
        self.restored = 0

    async def restore(self) -> None:
        """Does what the loop does for all fragments."""
        self.restored += 1
        self.fragment.restored(self.fragment.restore())

    async def settle(self) -> None:
        """Lets the exchange do what it can do without a step boundary."""
        for _ in range(50):
            await asyncio.sleep(0)

    async def step(self, *weights: float) -> None:
        """Takes a step that leads to these weights, at whose end waiting work is done."""
        await self.settle()
        self.weights[:] = weights
        trained = self.session.trained
        self.session.trained = Trained(trained.step_count + 1, trained.token_count + 10)
        self.session.boundary.work()
        self.fragment.wake()
        await self.settle()

    async def train(self) -> None:
        """Takes the two steps after which a delta of [0.5, -0.5] is due."""
        await self.step(0.75, 2.25)
        await self.step(0.5, 2.5)

    async def send(self) -> None:
        """Takes these steps, and returns when their delta is in flight."""
        await self.train()
        await self.until(lambda: self.is_in_flight)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Returns when it holds; what waits for a step boundary is done meanwhile."""
        async with asyncio.timeout(5):
            while not holds():
                self.session.boundary.work()
                await asyncio.sleep(0)

    def decide(self, fate: types_pb2.Fate.ValueType, **details: Any) -> None:
        """Has the fragment hear of the fate of the delta in flight."""
        state = self.fragment.state
        assert isinstance(state, InFlight)
        delta_id = state.delta.header.delta_id
        self.fragment.on_fate(types_pb2.DeltaFate(fragment="f", delta_id=delta_id, fate=fate, **details))

    @property
    def pushes(self) -> list[list[v1.PushDeltaRequest]]:
        return [request for name, request in self.transport.asked if name == "push_delta"]

    @property
    def is_in_flight(self) -> bool:
        return isinstance(self.fragment.state, InFlight)


@asynccontextmanager
async def living(**scripts: Any) -> AsyncIterator[World]:
    world = World(**scripts)
    running = asyncio.create_task(world.fragment.run())
    try:
        yield world
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


def values_of(push: list[v1.PushDeltaRequest]) -> list[float]:
    """Returns the numbers of the delta that a push holds."""
    values = np.empty(2, np.float32)
    decode_frames(b"".join(request.data for request in push), LAYOUT, values)
    return [float(value) for value in values]


async def test_a_delta_is_what_training_took_from_the_base_and_its_merge_moves_the_weights_by_the_rest() -> None:
    async with living(push_delta=[accepted], pull_fragment=[pull_to(LAYOUT, 4, START, [0.75, 2.25])]) as world:
        await world.step(0.75, 2.25)
        assert world.pushes == []
        await world.step(0.5, 2.5)
        await world.until(lambda: world.is_in_flight)
        (push,) = world.pushes
        header = push[0].header
        assert (header.base_version, header.base_digest) == (3, b"3")
        assert (header.step_count, header.token_count, header.last_step) == (2, 20, 2)
        assert values_of(push) == [0.5, -0.5]  # A - theta
        assert world.fragment.last_work == LastWork(pending_step_count=2)
        await world.step(0.375, 2.625)
        world.decide(types_pb2.FATE_MERGED, version=4, staleness=1)
        await world.until(lambda: world.fragment.ledger.version == 4)
        # theta + (A' - A) + q
        np.testing.assert_array_equal(world.weights, [0.375 - 0.25 + 0.5, 2.625 + 0.25 - 0.5])
        assert world.fragment.last_work == LastWork(merged_step_count=2, unsent_step_count=1)
        assert world.session.tally.deltas_merged == 1


async def test_work_of_a_refused_delta_is_in_the_next_one_from_the_newest_version() -> None:
    stale = WorkRefusedError("BASE_STALE", "too old")
    script = {"push_delta": [stale, accepted], "pull_fragment": [pull_to(LAYOUT, 4, START, [2.0, 2.0])]}
    async with living(**script) as world:
        await world.train()
        await world.until(lambda: world.fragment.ledger.version == 4)
        np.testing.assert_array_equal(world.weights, [1.5, 2.5])
        await world.step(1.5, 2.5)
        await world.until(lambda: world.is_in_flight)
        assert [values_of(push) for push in world.pushes] == [[0.5, -0.5], [0.5, -0.5]]
        assert [push[0].header.base_version for push in world.pushes] == [3, 4]
        assert world.session.tally.causes == {"refused: BASE_STALE": 1}
        assert world.session.tally.deltas_returned == 1


async def test_bytes_that_are_refused_as_damaged_are_made_anew() -> None:
    script = {"push_delta": [error_of("DIGEST_MISMATCH", "digest differs"), accepted]}
    async with living(**script, pull_fragment=[pull_to(LAYOUT, 3, START, [1.0, 2.0])]) as world:
        await world.train()
        await world.until(lambda: isinstance(world.fragment.state, Idle) and len(world.pushes) == 1)
        await world.step(0.5, 2.5)
        await world.until(lambda: world.is_in_flight)
        assert len({push[0].header.delta_id for push in world.pushes}) == 2
        assert world.session.tally.causes == {"refused: DIGEST_MISMATCH": 1}


async def test_from_a_base_of_which_the_syncer_has_a_delta_none_is_taken_again() -> None:
    script = {"push_delta": [WorkRefusedError("BASE_REPEATED", "used"), accepted]}
    same, newer = pull_to(LAYOUT, 3, START, [1.0, 2.0]), pull_to(LAYOUT, 4, START, [2.0, 2.0])
    async with living(**script, pull_fragment=[same, newer]) as world:
        await world.train()
        await world.until(lambda: isinstance(world.fragment.state, Idle) and len(world.pushes) == 1)
        assert not world.fragment.may_send
        world.fragment.on_version(4)
        await world.until(lambda: world.fragment.ledger.version == 4)
        assert world.fragment.may_send


def known(fate: types_pb2.Fate.ValueType, version: int = 0) -> Callable[[v1.QueryPushRequest], v1.QueryPushResponse]:
    """Returns the script of a question of which delta the syncer knows the fate."""

    def answer(request: v1.QueryPushRequest) -> v1.QueryPushResponse:
        decided = types_pb2.DeltaFate(fragment="f", delta_id=request.delta_id, fate=fate, version=version)
        return v1.QueryPushResponse(state=v1.PUSH_STATE_ACCEPTED, position=9, fate=decided)

    return answer


async def test_a_question_that_fails_after_a_download_is_asked_again_and_nothing_is_loaded_twice() -> None:
    questions = [error_of("DRAINING", "drains"), UNREACHABLE, known(types_pb2.FATE_MERGED, 4)]
    pulls = [pull_to(LAYOUT, 4, START, [0.75, 2.25])]
    async with living(push_delta=[accepted], QueryPush=questions, pull_fragment=pulls) as world:
        await world.send()
        world.fragment.on_version(4)
        await world.until(lambda: world.fragment.ledger.version == 4)


async def test_of_a_delta_whose_acknowledgement_was_lost_the_syncer_is_asked_and_nothing_is_sent_again() -> None:
    async with living(push_delta=[UNREACHABLE], QueryPush=[UNREACHABLE, known(types_pb2.FATE_PENDING)]) as world:
        await world.send()
        assert len(world.pushes) == 1
        assert world.fragment.is_flushed
        assert (world.session.position, world.session.problem) == (9, None)


@pytest.mark.parametrize("reason", ["UNREACHABLE", "STORE_ROLLED_BACK"])
async def test_of_a_delta_that_was_cut_only_what_the_syncer_does_not_have_is_sent_again(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "_LOST_STORE_WAIT_S", 0.001)

    def stored(_: v1.QueryPushRequest) -> v1.QueryPushResponse:
        begin, end = world.pushes[0][1], world.pushes[0][3]
        part = v1.StoredPart(first=begin.part.first, numel=begin.part.numel, digest=end.part_end.digest)
        return v1.QueryPushResponse(state=v1.PUSH_STATE_PARTS_STORED, position=5, parts=[part])

    async with living(push_delta=[error_of(reason, "cut"), accepted], QueryPush=[stored]) as world:
        await world.send()
        first, second = world.pushes
        assert first[0].header.delta_id == second[0].header.delta_id
        assert [request.WhichOneof("kind") for request in second] == ["header", "complete"]
        assert first[-1] == second[-1]


async def test_steps_of_a_delta_that_expired_are_unsent_again() -> None:
    async with living(push_delta=[accepted, accepted]) as world:
        await world.send()
        world.decide(types_pb2.FATE_EXPIRED, reason="staler than the policy allows. rounds=9")
        assert world.fragment.last_work == LastWork(
            unsent_step_count=2, because="expired: staler than the policy allows"
        )
        await world.until(lambda: isinstance(world.fragment.state, Idle))
        await world.step(0.25, 2.75)
        await world.until(lambda: world.is_in_flight)
        assert values_of(world.pushes[1]) == [0.75, -0.75]
        assert world.pushes[1][0].header.step_count == 3


async def test_work_of_a_quarantined_delta_is_lost_and_out_of_the_weights() -> None:
    script = {"push_delta": [accepted], "pull_fragment": [pull_to(LAYOUT, 4, START, [0.75, 2.25])]}
    async with living(**script) as world:
        await world.step(1.0, 2.0)
        await world.step(50.0, 2.0)
        await world.until(lambda: world.is_in_flight)
        await world.step(60.0, 2.0)
        world.decide(types_pb2.FATE_QUARANTINED, reason="norm is an outlier. ratio=168")
        await world.until(lambda: world.fragment.dropped_step_count == 3)
        np.testing.assert_array_equal(world.weights, START)
        world.fragment.on_version(4)
        await world.until(lambda: world.fragment.ledger.version == 4)
        np.testing.assert_array_equal(world.weights, [0.75, 2.25])
        assert world.fragment.unsent_step_count == 0
        assert world.fragment.last_work == LastWork(dropped_step_count=3, because="quarantined: norm is an outlier")
        assert world.session.tally.deltas_dropped == 1
        assert world.session.tally.causes == {"quarantined: norm is an outlier": 1}
        assert world.session.standing_problem is not None
        assert world.session.standing_problem.reason == "QUARANTINED"


async def test_weights_that_are_not_finite_are_set_back_to_the_base_and_their_steps_counted_as_lost() -> None:
    async with living() as world:
        await world.step(0.5, 2.5)
        await world.step(float("nan"), 2.5)
        await world.until(lambda: bool(world.restored))
        np.testing.assert_array_equal(world.weights, START)
        assert (world.fragment.unsent_step_count, world.fragment.dropped_step_count) == (0, 2)
        assert world.fragment.last_work == LastWork(dropped_step_count=2, because="not finite")
        assert isinstance(world.fragment.state, Idle)
        assert "optimizer.state.clear()" in str(world.session.standing_problem)


async def test_narrow_weights_that_are_not_finite_when_a_version_is_adopted_are_set_back_to_that_version() -> None:
    async with living(dtype=np.float16, pull_fragment=[pull_to(LAYOUT, 4, START, [0.75, 2.25])]) as world:
        world.fragment.on_version(4)
        await world.step(float("nan"), 2.5)
        await world.until(lambda: world.fragment.ledger.version == 4)
        assert not world.restored
        await world.step(float("nan"), 2.5)
        await world.until(lambda: bool(world.restored))
        np.testing.assert_array_equal(world.weights, [0.75, 2.25])
        np.testing.assert_array_equal(world.fragment.ledger.base, [0.75, 2.25])


async def test_a_run_that_is_closed_takes_nothing_and_leaves_the_work_unsent() -> None:
    async with living(push_delta=[RunClosedError("RUN_CLOSED", "closed")]) as world:
        await world.train()
        await world.until(lambda: world.session.is_closed)
        assert world.fragment.is_flushed
        assert world.fragment.last_work == LastWork(unsent_step_count=2)


async def test_an_earlier_sessions_delta_that_is_in_the_loaded_version_holds_nothing_up() -> None:
    async with living(push_delta=[accepted]) as world:
        world.fragment.wait_behind(types_pb2.DeltaFate(delta_id="earlier", fate=types_pb2.FATE_PENDING))
        world.decide(types_pb2.FATE_MERGED, version=3)
        await world.train()
        await world.until(lambda: bool(world.pushes))
        assert world.pushes[0][0].header.step_count == 2


async def test_a_flush_sends_what_is_not_due() -> None:
    async with living(push_delta=[accepted]) as world:
        await world.step(0.5, 2.5)
        assert not world.fragment.is_flushed
        world.session.is_flushing = True
        world.fragment.wake()
        await world.until(lambda: world.is_in_flight)
        assert [push[0].header.step_count for push in world.pushes] == [1]
        assert world.fragment.is_flushed
