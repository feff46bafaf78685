"""What a simulated run leaves behind: objects in the store, the learners' records, each replica's state."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from skerry.v1 import types_pb2
from skerry.wire.digests import tree_digest
from skerry_syncer.errors import SyncerError
from skerry_syncer.store.errors import RunNotFoundError, StoreError
from skerry_syncer.store.log.entries import entry_name
from skerry_syncer.store.log.state import RunState
from skerry_syncer.store.objects.interface import Objects
from skerry_syncer.store.versions.run import Run
from tests.simulation.learner_process import RUN
from tests.simulation.records import LearnerRecord
from tests.simulation.virtual_time import VirtualClock
from tests.support.dict_objects import DictObjects
from tests.support.log_bench import store_on

if TYPE_CHECKING:
    from tests.simulation.world import Plan, World


_LOOKS: Final = 20


@dataclass(frozen=True)
class Adopted:
    """The version that a learner has adopted of one fragment at the end."""

    learner: str
    fragment: str
    version: int
    digest: str  # of the weights that it takes for that version


@dataclass(frozen=True, repr=False)
class Evidence:
    """All that the auditor gets to see."""

    plan: Plan
    objects: Objects
    landed: Mapping[str, int]  # log entry -> count of events when it landed
    landed_at_s: Mapping[str, float]  # and the time, where it is known
    deleted: Mapping[str, tuple[bytes, int]]  # objects -> their bytes, and the count of events when they were deleted
    calm_begin_count: int | None  # count of events when the faults ended; None where there was no calm
    calm_end_count: int
    calm_s: float  # allowed for it
    adopted: tuple[Adopted, ...]
    records: tuple[LearnerRecord, ...]
    state_digests: tuple[tuple[str, str], ...]  # (replica, digest of what it folded)
    policy_changes: Mapping[str, types_pb2.Policy]  # by request id: the fields that an operator changed
    complaints: tuple[str, ...]

    @property
    def stored(self) -> dict[str, tuple[bytes, float]]:
        """The objects of a simulated store, by name."""
        assert isinstance(self.objects, DictObjects)
        return self.objects.objects


async def gather(world: World) -> Evidence:
    """Returns the evidence, and has every replica fold the log to its end for it."""
    complaints = [*world.complaints, *world.network.defects]
    digests = await _digests(world, complaints)
    objects = DictObjects()
    objects.objects.update(world.store.objects.objects)
    return Evidence(
        plan=world.plan,
        objects=objects,
        landed=dict(world.store.landed),
        landed_at_s=dict(world.store.landed_at_s),
        deleted=dict(world.store.deleted),
        calm_begin_count=world.calm_begin_count,
        calm_end_count=world.calm_end_count,
        calm_s=world.calm_s,
        adopted=tuple(_adopted(world)),
        records=tuple(record for learner in world.learners for record in learner.records),
        state_digests=digests,
        policy_changes=dict(world.operator.policy_changes),
        complaints=tuple(complaints),
    )


async def _digests(world: World, complaints: list[str]) -> tuple[tuple[str, str], ...]:
    """Returns the digests of what the replicas fold, all at one position: the log's last."""
    for _ in range(_LOOKS):
        logs = []
        for replica in world.replicas:
            try:
                assert replica.host is not None
                log = (await replica.host.open(RUN)).log
                await log.tail()
            except (StoreError, SyncerError) as error:
                complaints.append(f"replica {replica.index} can't read the run. cause={error!r}")
                return ()
            logs.append(log)
        newest = max(log.state.position for log in logs)
        is_last = entry_name(logs[0].prefix, newest + 1) not in world.store.landed  # that nobody has read yet
        if is_last and {log.state.position for log in logs} == {newest}:
            return tuple((f"replica-{index}", state_digest(log.state)) for index, log in enumerate(logs))
        await asyncio.sleep(1.0)
    complaints.append("the log of a closed run does not come to rest")
    return ()


def _adopted(world: World) -> Iterator[Adopted]:
    for learner in world.learners:
        if learner.exchange is None or not learner.process.is_alive:
            continue
        for name, fragment in learner.exchange._fragments.items():
            ledger = fragment.ledger
            yield Adopted(learner.name, name, ledger.version, tree_digest(ledger.anchor).hex())


def state_digest(state: RunState) -> str:
    """Returns a digest of everything that a fold holds."""
    fields = msgspec.to_builtins(vars(state), order="deterministic")
    return hashlib.sha256(repr(fields).encode()).hexdigest()


async def open_run(objects: Objects) -> Run:
    """Returns the run as the store itself has it, its log folded to its end. Call `log.tail` to follow it.

    Raises:
        RunNotFoundError: nobody has created the run yet.
        StoreError: the log can't be read.
    """
    store = store_on(objects, clock=VirtualClock())
    uid = await store.resolve(RUN)
    if uid is None:
        raise RunNotFoundError(f"nobody has created the run. run={RUN}")
    return await store.open_run(RUN, uid)
