"""Learners that each call a replica of their own make the rounds that they would make with one."""

from __future__ import annotations

import asyncio
import random
from itertools import count, islice

import pytest

from skerry.wire.policy import Policy
from skerry_syncer.run.host import HostSettings
from tests.simulation.learner_process import RUN, LearnerProcess
from tests.simulation.network import Endpoint, Network, NetworkFaults
from tests.simulation.processes import ProcessLoop
from tests.simulation.replica_process import ReplicaProcess
from tests.simulation.shared_store import SharedStore, StoreFaults

LEARNER_COUNT, FRAGMENT_COUNT = 8, 3
H = 12
LAST_ROUNDS = 6  # of those that a run remembers
BEGIN_S, WATCHED_S = 60.0, 120.0  # ten rounds of steps of a second
BUCKET = StoreFaults(latency_s=(0.015, 0.015))
NEAR = NetworkFaults(latency_s=(0.0005, 0.001), wander=0.0)


async def _watched() -> tuple[int, list[int]]:
    """Returns how many versions were made while the run was watched, and how many deltas each of the last ones has."""
    events = count(1)
    store, source = SharedStore(lambda: next(events)), random.Random(7)
    endpoints = [Endpoint() for _ in range(LEARNER_COUNT)]
    network = Network(endpoints, NEAR, source)
    replicas = [
        ReplicaProcess(index, network, store, BUCKET, seed=f"replica-{index}", settings=HostSettings())
        for index in range(LEARNER_COUNT)
    ]
    learners = [
        LearnerProcess(
            f"learner-{index}",
            Network([endpoint], NEAR, source),
            Policy(inner_step_count=H),
            step_s=source.uniform(0.98, 1.02),
            seed=f"learner-{index}",
            count=lambda: next(events),
            lane_bytes=2**22,
        )
        for index, endpoint in enumerate(endpoints)
    ]
    processes: list[ReplicaProcess | LearnerProcess] = [*replicas, *learners]
    for process in processes:
        process.boot()
        await asyncio.sleep(source.random())
    await asyncio.sleep(BEGIN_S)
    assert replicas[0].host is not None
    log = (await replicas[0].host.open(RUN)).log
    fragments = log.state.fragments.values()
    before = sum(fragment.version for fragment in fragments)
    await asyncio.sleep(WATCHED_S)
    await log.tail()
    made = sum(fragment.version for fragment in fragments) - before
    members = [
        len(record.close.members)
        for fragment in fragments
        for record in islice(log.state.chain_of_rounds(fragment), LAST_ROUNDS)
    ]
    for process in processes:
        for one in process.processes:
            one.bury()
    return made, members


@pytest.mark.long
@pytest.mark.timeout(600)
def test_rounds_of_eight_learners_do_not_split_where_each_has_a_syncer_of_its_own() -> None:
    with asyncio.Runner(loop_factory=ProcessLoop) as runner:
        made, members = runner.run(_watched())
    assert 0.9 <= made / (FRAGMENT_COUNT * WATCHED_S / H) <= 1.1
    assert members.count(LEARNER_COUNT) >= 0.9 * len(members), members
