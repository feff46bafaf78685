"""A learner that an admin ejects is out on every replica, and nothing of it is merged any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from skerry.v1 import runs_pb2 as runs
from skerry.v1 import types_pb2 as types
from skerry_syncer.server import serving
from tests.integration.syncer.conftest import LOCAL
from tests.support.hooked_objects import HookedObjects
from tests.support.raw_learner import (
    INT4,
    LONG,
    Stubs,
    attached,
    connected,
    create_run,
    delta_values,
    events_until,
    observed,
    pull,
    push_messages,
    quick,
    refused,
)

EJECTED = ("EJECTED", grpc.StatusCode.PERMISSION_DENIED)


@pytest.fixture
def objects() -> HookedObjects:
    return HookedObjects()


@pytest.fixture
async def replicas(objects: HookedObjects) -> AsyncIterator[tuple[Stubs, Stubs]]:
    """Connections to two replicas."""
    async with (
        serving(objects, LOCAL) as first,
        serving(objects, LOCAL) as second,
        connected(first.port) as one,
        connected(second.port) as other,
    ):
        yield one, other


async def set_ejection(
    stubs: Stubs, learner: str, *, is_ejected: bool = True, digit: str = "1"
) -> runs.SetEjectionResponse:
    request = runs.SetEjectionRequest(request_id=digit * 32, name="demo", learner_id=learner, is_ejected=is_ejected)
    return await stubs.runs.SetEjection(request)


async def test_an_ejected_learner_is_out_on_every_replica_until_it_is_readmitted(
    replicas: tuple[Stubs, Stubs],
) -> None:
    here, there = replicas
    run, _ = await create_run(here)
    learner = await attached(there, run, "us")
    watch = await observed(there, run)
    for _ in range(2):
        answer = await set_ejection(here, "us")
        assert (answer.learner.is_ejected, answer.learner.is_live) == (True, False)
    assert (await set_ejection(here, "us", digit="2")).run.position == answer.run.position, "nothing is written twice"
    with refused(*EJECTED) as refusals:
        await learner.event("never")
    assert "`skerry runs readmit demo us`" in refusals[0].message
    changed = (await events_until(watch, "ejection_changed"))[-1].ejection_changed
    assert (changed.learner_id, changed.is_ejected) == ("us", True)
    with refused(*EJECTED):
        await learner.attach()
    await set_ejection(there, "us", is_ejected=False, digit="3")
    changed = (await events_until(watch, "ejection_changed"))[-1].ejection_changed
    assert not changed.is_ejected
    learner.stubs = here
    await learner.attach()
    assert (await learner.advance()).version_committed.merged[0].learner_id == "us"


async def test_a_version_in_the_making_is_made_without_the_learner_that_is_ejected(
    objects: HookedObjects, replicas: tuple[Stubs, Stubs]
) -> None:
    here, there = replicas
    run, _ = await create_run(here, policy=quick(quorum_count=3, lease_term=LONG))
    learners = [await attached(stubs, run, name) for name, stubs in (("eu", here), ("ap", there), ("us", there))]
    watch, base = await observed(here, run), await pull(here, run, "body")
    objects.hooks["before write", "updates/body/"] = (go := asyncio.Event()).wait
    for seed, learner in enumerate(learners):
        await learner.push(learner.header(base, "body"), delta_values(seed))
    await events_until(watch, "round_closed")
    await here.runs.SetPolicy(
        runs.SetPolicyRequest(request_id="9" * 32, name="demo", policy=types.Policy(quorum_count=2))
    )
    await set_ejection(here, "us")
    (fate,) = (await events_until(watch, "fates_decided"))[-1].fates_decided.fates
    assert (fate.learner_id, fate.fate, fate.reason) == ("us", types.FATE_EXPIRED, "its learner was ejected")
    go.set()
    committed = (await events_until(watch, "version_committed"))[-1].version_committed
    assert (committed.version.version, {delta.learner_id for delta in committed.merged}) == (1, {"eu", "ap"})


async def test_a_push_that_is_under_way_elsewhere_is_refused_at_its_end(replicas: tuple[Stubs, Stubs]) -> None:
    here, there = replicas
    run, _ = await create_run(here, policy=quick(lease_term=LONG))
    learner, neighbour = await attached(there, run, "us"), await attached(there, run, "eu")
    header = learner.header(await pull(there, run, "body"), "body")
    *messages, complete = push_messages(header, delta_values(), INT4)
    call = there.exchange.PushDelta(None)
    for message in messages:
        await call.write(message)
    await neighbour.event("round_opened")  # the replica has admitted the push
    await set_ejection(here, "us")
    with refused(*EJECTED):
        await call.write(complete)
        await call
    assert (await learner.query(header)).fate.fate == types.FATE_UNSPECIFIED


async def test_a_name_that_never_was_a_learner_is_refused_with_the_names_that_were(
    replicas: tuple[Stubs, Stubs],
) -> None:
    here, there = replicas
    run, _ = await create_run(here)
    for name in ("us", "eu"):
        await attached(there, run, name)
    with refused("LEARNER_NOT_FOUND", grpc.StatusCode.NOT_FOUND) as refusals:
        await set_ejection(here, "usa")
    assert "known=eu, us" in refusals[0].message
