"""A learner's exchange as its training loop meets it, with a scripted syncer."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration

from skerry import RunClosedError, StopExchangingError
from skerry.algorithm.rebase import Trained
from skerry.errors import error_of
from skerry.exchange.boundary import Boundary
from skerry.exchange.loop import ExchangeLoop
from skerry.exchange.session import REMINDER_S
from skerry.exchange.settings import ExchangeSettings
from skerry.model.interface import ArrayParameters
from skerry.runtime.workers import InlineWorkers
from skerry.stats import LastWork
from skerry.v1 import capabilities_pb2, runs_pb2, types_pb2
from skerry.v1 import exchange_pb2 as v1
from skerry.wire import FragmentLayout, TensorSpec
from skerry.wire.messages import layouts_to_messages
from tests.support.heard_logs import heard_logs
from tests.support.scripted_transport import ScriptedTransport, accepted, pull_to, quick_calls
from tests.support.seeded_entropy import SeededEntropy
from tests.support.still_clock import StillClock

LAYOUTS = tuple(FragmentLayout(name, (TensorSpec(name, (2,)),)) for name in ("f", "g"))
TENSORS, FRAGMENTS = layouts_to_messages(LAYOUTS, {"f": "float32", "g": "float32"})


class World:
    """A learner of two fragments, whose run has version 3 of one and version 1 of the other."""

    def __init__(self, *, status: types_pb2.RunStatus.ValueType = types_pb2.RUN_STATUS_OPEN) -> None:
        run = types_pb2.Run(
            name="fit", uid="u", position=5, status=status, tensors=TENSORS, fragments=FRAGMENTS,
            policy=types_pb2.Policy(inner_step_count=4),
        )  # fmt: skip
        self.clock = StillClock()
        self.arrays = {name: np.zeros(2, np.float32) for name in ("f", "g")}
        attached = v1.Attached(run=run, lease_term=Duration(seconds=3))
        newer = types_pb2.VersionCommitted(version=types_pb2.FragmentVersion(fragment="f", version=4))
        event = types_pb2.Event(position=6, version_committed=newer)
        self.transport = ScriptedTransport(
            attach=[[v1.AttachResponse(attached=attached), v1.AttachResponse(event=event)]],
            GetCapabilities=[capabilities_pb2.GetCapabilitiesResponse()],
            GetRun=[runs_pb2.GetRunResponse(run=run)],
            pull_fragment=[
                pull_to(LAYOUTS[0], 3, [0, 0], [1, 2]),
                pull_to(LAYOUTS[1], 1, [0, 0], [3, 4]),
                pull_to(LAYOUTS[0], 4, [1, 2], [2, 3]),
            ],
            push_delta=[accepted] * 9,
        )
        self.parameters, self.workers = ArrayParameters(self.arrays), InlineWorkers()
        self.exchange = ExchangeLoop(
            quick_calls(self.transport),
            self.parameters,
            ExchangeSettings(run="fit", learner_id="us"),
            workers=self.workers,
            entropy=SeededEntropy(random.Random(1)),
            boundary=Boundary(self.clock, asyncio.get_running_loop().call_soon),
        )


async def joined() -> World:
    world = World()
    await world.exchange.join()
    return world


async def test_joining_loads_the_newest_version_of_every_fragment() -> None:
    world = await joined()
    assert {name: array.tolist() for name, array in world.arrays.items()} == {"f": [1, 2], "g": [3, 4]}
    stats = world.exchange.stats
    assert (stats.versions, stats.parameters_down_count) == ({"f": 3, "g": 1}, 4)
    assert (stats.progress, stats.is_closed, stats.failure) == (None, False, None)
    world.arrays["g"] += 1
    merged = {name: weights.tolist() for name, weights in world.exchange.merged_weights().items()}
    assert merged == {"f": [1, 2], "g": [3, 4]}
    assert world.exchange.load_merged()
    assert world.arrays["g"].tolist() == [3, 4]


async def test_one_of_several_processes_loads_its_share() -> None:
    world = World()
    await world.exchange.join(number=0, count=2)
    assert list(world.exchange.stats.versions) == ["f"]
    assert len(world.exchange.layouts) == 2


async def test_a_run_that_is_closed_is_not_joined() -> None:
    with pytest.raises(RunClosedError):
        await World(status=types_pb2.RUN_STATUS_CLOSED).exchange.join()


async def test_steps_are_counted_on_after_an_earlier_processs_and_timed_from_end_to_begin() -> None:
    world = await joined()
    world.exchange.count_from(Trained(100, 1000))
    for tokens, loss in ((8, 0.5), (np.int64(4), None)):
        world.clock.now_s += 2.0
        world.exchange.step(tokens, loss)  # type: ignore[arg-type]  # a training loop may have any number
    stats = world.exchange.stats
    assert (stats.step_count, stats.token_count, stats.unsent_step_count) == (102, 1012, 2)
    assert (stats.loss, stats.step_time_s) == (None, 2.0)
    world.clock.now_s += 3.0
    world.exchange.step(8)
    assert world.exchange.stats.step_time_s == pytest.approx(0.9 * 2.0 + 0.1 * 3.0)
    with pytest.raises(ValueError, match="before its first step"):
        world.exchange.count_from(Trained(7, 70))


async def test_tokens_that_are_no_count_are_refused_and_no_step_is_counted() -> None:
    world = await joined()
    for tokens in (0, 1.5):
        with pytest.raises(ValueError, match="tokens"):
            world.exchange.step(tokens)  # type: ignore[arg-type]  # as a training loop may
    assert world.exchange.stats.step_count == 0


async def test_weights_that_something_else_replaced_end_the_exchange_at_the_step() -> None:
    world = await joined()
    world.arrays["g"] = np.zeros(2, np.float32)
    for _ in range(2):
        with pytest.raises(StopExchangingError, match="array=g"):
            world.exchange.step(8)
        await asyncio.sleep(0)
    assert world.exchange.stats.failure is not None
    assert world.exchange.is_flushed
    assert not world.exchange.load_merged(), "the model's weights are somebody's own"


async def test_work_is_unsent_until_it_is_sent_and_says_why() -> None:
    world = await joined()
    assert world.exchange.is_settled
    world.exchange.step(8)
    assert not world.exchange.is_flushed
    assert world.exchange.last_work == LastWork(unsent_step_count=1, because="it was not acknowledged")
    world.exchange.stop(StopExchangingError("SESSION_FENCED", "a newer session"))
    assert world.exchange.is_settled
    assert world.exchange.last_work == LastWork(unsent_step_count=1, because="a newer session")


async def test_a_learner_whose_work_nobody_takes_is_reminded_once_a_minute() -> None:
    world = await joined()
    world.exchange._session.note_failure(error_of("STORE_FULL", "no room"))
    with heard_logs() as logs:
        for _ in range(4 * 4 + 2):
            world.clock.now_s += REMINDER_S / 16
            world.exchange.step(8)
        world.clock.now_s += REMINDER_S
        world.exchange.step(8)
        world.exchange.stop(StopExchangingError("SESSION_FENCED", "a newer session"))
        world.clock.now_s += REMINDER_S
        world.exchange.step(8)
    told = [(line.get("unsent_steps"), line["reason"]) for line in logs]
    assert told == [(16, "STORE_FULL"), (19, "STORE_FULL"), (None, "SESSION_FENCED"), (None, "SESSION_FENCED")]


async def test_where_weights_of_one_fragment_are_not_finite_all_are_put_back_at_one_boundary() -> None:
    world = await joined()
    for _ in range(2):
        world.exchange.step(8)
    world.arrays["f"][:] = np.nan
    world.arrays["g"][:] = 9
    restoring = asyncio.ensure_future(world.exchange.restore_all())
    await asyncio.sleep(0)
    assert world.exchange.step(8) == ("f", "g")
    await restoring
    assert {name: array.tolist() for name, array in world.arrays.items()} == {"f": [1, 2], "g": [3, 4]}
    stats = world.exchange.stats
    assert (stats.dropped_step_count, stats.unsent_step_count) == (3, 0)


@pytest.mark.parametrize("error", [TypeError("a defect"), asyncio.CancelledError()], ids=["error", "cancelled"])
@pytest.mark.parametrize("place", ["transport.push_delta", "transport.pull_fragment", "workers.run", "parameters.add"])
async def test_no_defect_ends_the_exchange_silently(
    place: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    world = await joined()
    part, method = place.split(".")
    monkeypatch.setattr(getattr(world, part), method, fail)
    running = asyncio.ensure_future(world.exchange.run())
    async with asyncio.timeout(5):
        while (failure := world.exchange.stats.failure) is None:
            world.exchange.step(8)
            await asyncio.sleep(0)
    assert failure.reason == "DEFECT"
    assert str(error) in str(failure)
    await running
    assert not world.exchange.stats.is_attached
    world.exchange.step(8)  # training goes on
