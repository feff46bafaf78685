"""The attach stream: what a learner reports, and what it makes of the answers."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration

from skerry.algorithm.rebase import Ledger, Trained
from skerry.errors import PoisonedError, RefusedError, StopExchangingError, error_of
from skerry.exchange.attachment import Attachment
from skerry.exchange.fragment import FragmentExchange
from skerry.exchange.session import Session
from skerry.exchange.states import Idle, InFlight
from skerry.v1 import exchange_pb2 as v1
from skerry.v1 import types_pb2
from skerry.wire import FragmentLayout, TensorSpec
from tests.support.scripted_transport import ScriptedTransport, quick_calls, scripted_session

LAYOUT = FragmentLayout("f", (TensorSpec("w", (2,)),))
PENDING = types_pb2.DeltaFate(fragment="f", delta_id="d", fate=types_pb2.FATE_PENDING)


def attached(planned_token_count: int = 0, **fields: Any) -> v1.AttachResponse:
    """Returns the syncer's first answer."""
    policy = types_pb2.Policy(planned_token_count=planned_token_count)
    run = types_pb2.Run(name="fit", uid="u", position=5, status=types_pb2.RUN_STATUS_OPEN, policy=policy)
    lease = Duration(seconds=3)
    return v1.AttachResponse(attached=v1.Attached(run=run, lease_term=lease, run_token_count=400, **fields))


def event(position: int, **fields: Any) -> v1.AttachResponse:
    """Returns an event."""
    return v1.AttachResponse(event=types_pb2.Event(position=position, **fields))


class World:
    """A learner with one fragment of version 3, after 4 steps of 10 tokens; an earlier process took 100 steps."""

    def __init__(self, *streams: Any) -> None:
        """Each stream that it opens has these answers."""
        weights = np.zeros(2, np.float32)
        self.transport = ScriptedTransport(attach=streams)
        self.session: Session = scripted_session(quick_calls(self.transport), {"w": weights}, connect_timeout_s=5.0)
        self.session.earlier, self.session.trained = Trained(100, 1000), Trained(4, 40)
        self.fragment = FragmentExchange(
            self.session, LAYOUT, Ledger(3, b"3", weights, weights), contributed_step=0, restore_all=_nothing
        )
        self.attachment = Attachment(self.session, {"f": self.fragment})

    async def live(self, stream_count: int = 1) -> None:
        """Attaches, leaves in the stream of this number, and returns when it has ended."""
        running = asyncio.create_task(self.attachment.run())
        try:
            await self.attachment.wait()
            async with asyncio.timeout(5):
                while len(self.hellos) < stream_count or not self.session.attached.is_set():
                    await asyncio.sleep(0)
            await self.attachment.leave()
        finally:
            await running

    @property
    def requests(self) -> list[v1.AttachRequest]:
        """What it sent."""
        return [request for _, request in self.transport.asked]

    @property
    def hellos(self) -> list[v1.Hello]:
        """With what it began each stream."""
        return [request.hello for request in self.requests if request.HasField("hello")]


async def _nothing() -> None:
    pass


async def test_a_learner_says_hello_reports_what_it_trained_in_all_and_says_goodbye() -> None:
    world = World([attached()])
    quarantined = PoisonedError("QUARANTINED", "norm is an outlier")
    world.session.not_merged(LAYOUT, "quarantined", quarantined, is_lost=True)
    world.fragment.dropped_step_count = 2
    world.session.is_flushing = True
    await world.live()
    hello, *reports, leave = world.requests
    assert (hello.hello.run, hello.hello.learner_id, hello.hello.session_id) == ("fit", "us", world.session.session_id)
    assert leave.HasField("leave")
    report = reports[-1].report
    assert (report.step_count, report.token_count, report.unsent_step_count) == (104, 1040, 4)
    assert (report.problem, report.dropped_step_count) == ("QUARANTINED", 2)
    assert (report.is_flushing, report.is_ending) == (True, False)
    assert [(adopted.fragment, adopted.version) for adopted in report.adopted] == [("f", 3)]


async def test_progress_is_the_share_that_was_reported_and_the_own_tokens_since() -> None:
    world = World([attached(1000)])
    seen = [world.session.progress]
    await world.live()
    for token_count in (40, 60, 10**6):
        world.session.trained = Trained(6, token_count)
        seen.append(world.session.progress)
    assert seen == [None, 0.4, 0.42, 1.0]


async def test_progress_does_not_fall_back_when_others_work_is_merged_before_ones_own() -> None:
    world = World([attached(1000)])
    await world.live()
    world.session.trained = Trained(6, 300)
    assert world.session.progress == 0.66
    world.session.run_went_on(1.0, 410.0)
    assert world.session.progress == 0.66
    world.session.run_went_on(2.0, 750.0)
    assert world.session.progress == 0.75


async def test_a_run_without_a_plan_has_no_progress() -> None:
    world = World([attached()])
    await world.live()
    assert world.session.progress is None


async def test_progress_falls_back_by_a_roll_back_and_follows_a_new_plan() -> None:
    world = World([
        attached(1000),
        event(6, rolled_back=types_pb2.RolledBack(run_token_count=100.0)),
        event(7, policy_changed=types_pb2.Policy(planned_token_count=500)),
    ])  # fmt: skip
    await world.live()
    assert world.session.progress == 0.2


async def test_events_tell_of_versions_policy_and_the_end_of_the_run() -> None:
    committed = types_pb2.VersionCommitted(
        version=types_pb2.FragmentVersion(fragment="f", version=4), run_token_count=440.0
    )
    world = World([
        attached(1000),
        event(6, policy_changed=types_pb2.Policy(inner_step_count=7)),
        event(9, version_committed=committed),
        event(10, status_changed=types_pb2.RUN_STATUS_CLOSED),
    ])  # fmt: skip
    await world.live()
    assert world.session.position == 10
    assert world.session.policy.inner_step_count == 7
    assert world.fragment._newest_version == 4
    assert world.session.progress == 0.44
    assert world.session.is_closed


async def test_a_policy_that_is_not_known_costs_no_more_than_another_stream() -> None:
    world = World([attached(), event(6, policy_changed=types_pb2.Policy(quorum_count=-1))], [attached()])
    before = world.session.policy
    await world.live(stream_count=2)
    assert world.session.policy == before
    assert (world.session.failure, world.session.position) == (None, 6)


async def test_a_fragment_waits_for_the_fate_of_a_delta_that_an_earlier_session_sent() -> None:
    world = World([attached(pending=[PENDING])])
    await world.live()
    state = world.fragment.state
    assert isinstance(state, InFlight)
    assert (state.delta.header.delta_id, state.delta.is_own, state.is_pending) == ("d", False, True)


async def test_of_a_session_that_attaches_again_no_fragment_waits() -> None:
    world = World([error_of("UNREACHABLE", "no link")], [attached(), error_of("UNREACHABLE", "cut")],
                  [attached(pending=[PENDING])])  # fmt: skip
    await world.live(stream_count=3)
    assert isinstance(world.fragment.state, Idle)
    assert {hello.session_id for hello in world.hellos} == {world.session.session_id}
    assert [hello.seen_position for hello in world.hellos] == [0, 0, 5]


@pytest.mark.parametrize(
    "error", [RefusedError("PERMISSION_DENIED", "not yours"), StopExchangingError("SESSION_FENCED", "a newer one")]
)
async def test_what_is_final_is_raised_before_training_begins(error: Exception) -> None:
    world = World([error])
    with pytest.raises(type(error)):
        await world.live()
    assert world.session.is_over


async def test_a_further_process_hears_what_the_first_one_hears_and_tells_it_nobody() -> None:
    world, told = World(), list[v1.AttachResponse]()
    world.attachment = further = Attachment(world.session, {"f": world.fragment}, relay=told.append)
    further.is_first = False
    further.heard.put_nowait(attached())
    further.heard.put_nowait(event(9, status_changed=types_pb2.RUN_STATUS_CLOSED))
    running = asyncio.create_task(further.run())
    await further.wait()
    async with asyncio.timeout(5):
        while not world.session.is_closed:
            await asyncio.sleep(0)
        await further.leave()
        await running
    assert told == []
