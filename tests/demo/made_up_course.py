"""A made-up course of the demo, small enough to check by hand: what the pure parts of it are tested on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skerry.demo.follow import MetricsFollower
from skerry.learner.metrics import MetricsLine, MetricsWriter

START_S = 1_000_000.0
STEP_S = 0.1


def entry(position: int, *items: dict[str, Any]) -> str:
    """A line of the log, written half a second after the one before it."""
    return json.dumps({"position": position, "written_at_unix_s": START_S + position / 2, "items": list(items)})


def accepted(delta: str, learner: str, *, fragment: str = "body", base: int = 0) -> dict[str, Any]:
    """An accepted delta of one part of 100 bytes."""
    return {
        "kind": "accepted",
        "delta": delta,
        "fragment": fragment,
        "learner": learner,
        "session": f"{learner}-session",
        "base_version": base,
        "step_count": 24,
        "token_count": 240,
        "parts": [{"size_bytes": 100}],
    }


def closed(version: int, members: Sequence[str], decided: Sequence[tuple[str, str]] = ()) -> dict[str, Any]:
    """A closed round of `body`, with deltas that met another fate in it."""
    return {
        "kind": "closed",
        "fragment": "body",
        "version": version,
        "attempt": 0,
        "members": [{"delta": delta} for delta in members],
        "decided": [{"delta": delta, "fate": fate, "reason": "too stale"} for delta, fate in decided],
    }


def committed(version: int) -> dict[str, Any]:
    """A version of `body`, whose update has 60 bytes."""
    return {"kind": "committed", "fragment": "body", "version": version, "attempt": 0, "update": [{"size_bytes": 60}]}


LOG = (
    entry(1, accepted("initial", "us-east", base=-1)),
    entry(2, {"kind": "status", "status": "open"}),
    entry(3, accepted("a1", "us-east"), accepted("b1", "eu-west")),
    entry(4, closed(1, ["a1", "b1"]), committed(1)),
    entry(5, accepted("a2", "us-east", base=1), accepted("c1", "ap-south"), accepted("b2", "eu-west", base=1)),
    entry(6, closed(2, ["a2"], decided=[("c1", "expired")])),
    entry(7, committed(2)),
    entry(8, {"kind": "fates", "decided": [{"delta": "b2", "fate": "superseded", "reason": "newer session"}]}),
    entry(9, {"kind": "status", "status": "closed"}),
)


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
