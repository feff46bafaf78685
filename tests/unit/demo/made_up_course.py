"""A made-up course of the demo, small enough to check by hand: what the pure parts of it are tested on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

from skerry.runtime.clock import SystemClock
from skerry.runtime.workers import InlineWorkers
from skerry.wire.codecs import Codec, Encoding
from skerry.wire.layout import FragmentLayout, TensorSpec
from skerry_demo.follow import MetricsFollower
from skerry_demo.history import History, read_history
from skerry_learner.metrics import MetricsLine, MetricsWriter
from skerry_syncer.store.log.entries import (
    AcceptedItem,
    ClosedItem,
    CommittedItem,
    Decided,
    Fate,
    Item,
    Member,
    MergeScalars,
    ObjectRef,
    RunSpec,
    RunStatus,
    SessionItem,
    SnapshotItem,
    StatusItem,
)
from skerry_syncer.store.log.run_log import RunLog
from tests.support.dict_objects import DictObjects
from tests.support.seeded_entropy import SeededEntropy

START_S = 1_000_000.0
STEP_S = 0.1


class LogClock(SystemClock):
    """Time as the log's writer sees it: the entry at position p is written p / 2 seconds after the start."""

    position = 0

    def unix_s(self) -> float:
        self.position += 1
        return START_S + self.position / 2


def accepted(delta: str, learner: str, *, base: int = 0, session: str = "") -> AcceptedItem:
    """An accepted delta of `body`, in one part of 100 bytes."""
    return AcceptedItem(
        delta=delta,
        fragment="body",
        learner=learner,
        session=session or f"{learner}-session",
        base_version=base,
        base_digest=f"version {base}",
        digest="",
        parts=(ObjectRef(f"deltas/{delta}", 0, 4, 100, ""),),
        step_count=24,
        token_count=240,
        last_step=24,
        squared_norms=(1.0,),
    )


def closed(version: int, members: Sequence[str], decided: Sequence[Decided] = ()) -> ClosedItem:
    """A closed round of `body`, with deltas that met another fate in it."""
    return ClosedItem("body", version, 0, tuple(Member(delta, 1.0, 0) for delta in members), 1.0, tuple(decided))


def committed(version: int, member_count: int) -> CommittedItem:
    """A version of `body`, whose update has 60 bytes."""
    scalars = MergeScalars("3f800000", "00000000", ("3f800000",), (("3f800000",),) * member_count)
    update = ObjectRef(f"updates/{version}", 0, 4, 60, "")
    return CommittedItem("body", version, 0, (update,), Encoding(Codec.FLOAT32), f"version {version}", scalars)


def attached(learner: str, session: str = "") -> SessionItem:
    """A session of `learner`, which fences its older ones."""
    return SessionItem(learner, session or f"{learner}-session", "")


ENTRIES: tuple[tuple[Item, ...], ...] = (
    (accepted("initial", "us-east", base=-1),),
    (SnapshotItem("body", 0, "version 0", (ObjectRef("snapshots/0", 0, 4, 16, ""),), ()), StatusItem(RunStatus.OPEN)),
    (attached("us-east"), attached("eu-west"), attached("ap-south")),
    (accepted("a1", "us-east"), accepted("b1", "eu-west")),
    (closed(1, ["a1", "b1"]), committed(1, 2)),
    (accepted("a2", "us-east", base=1), accepted("c1", "ap-south"), accepted("b2", "eu-west", base=1)),
    (closed(2, ["a2"], [Decided("c1", Fate.EXPIRED, "too stale")]),),
    (committed(2, 1),),
    # The killed learner is back, as a client that does not wait for what its old session left pending.
    (attached("eu-west", "eu-west-again"), accepted("b3", "eu-west", base=1, session="eu-west-again")),
    (StatusItem(RunStatus.CLOSING), StatusItem(RunStatus.CLOSED)),
)
"""The whole log, entry by entry. Version 1 is committed 2.5 s after the start and version 2 after 4 s."""


async def _written_log(entries: Sequence[Sequence[Item]]) -> History:
    spec = RunSpec("demo", "0" * 32, (FragmentLayout("body", (TensorSpec("t", (4,)),)),), {"t": "float32"}, 0.0)
    objects, entropy = DictObjects(), SeededEntropy(random.Random(0))
    log = RunLog(objects, spec, clock=LogClock(), entropy=entropy, workers=InlineWorkers(), writer="test")
    for items in entries:
        await log.append(items)
    history = await read_history(log)
    await log.close()
    return history


def written_history(*entries: Sequence[Item]) -> History:
    """The history of a real run log that has `entries`."""
    return asyncio.run(_written_log(entries))


def written_metrics(
    path: Path, learner: str, *, steps: int, acknowledged: Sequence[int], stall_ms: float
) -> MetricsFollower:
    """A metrics file with one attempt for each count of acknowledged deltas."""
    step = 0
    with MetricsWriter(path) as writer:
        for attempt, count in enumerate(acknowledged):
            for number in range(steps // len(acknowledged)):
                step += 1
                is_last = number + 1 == steps // len(acknowledged)
                writer.write(
                    MetricsLine(
                        learner=learner,
                        attempt=attempt,
                        time_s=step * STEP_S,
                        unix_s=START_S + step * STEP_S,
                        step=step,
                        tokens=step * 10,
                        loss=5.0 - step / 60,
                        learning_rate=1e-3,
                        step_time_ms=90.0,
                        sync_stall_ms=stall_ms if step == 7 else 0.1,
                        sync_cpu_ms=1.0,
                        val_loss=5.0 - step / 30 if step % 10 == 0 else None,
                        is_attached=bool(learner != "single"),
                        bytes_up=500 * count if is_last else 0,
                        parameters_up=1000 * count if is_last else 0,
                        bytes_down=600,
                        parameters_down=1000,
                        deltas_acknowledged=count if is_last else 0,
                        versions={"body": attempt},
                    ),
                )
    follower = MetricsFollower(path)
    follower.poll()
    return follower
