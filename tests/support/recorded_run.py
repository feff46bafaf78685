"""A run's history as an observer records it, made from events alone."""

from __future__ import annotations

from typing import Any

from skerry.history.run_history import RunHistory
from skerry.v1 import types_pb2 as v1
from skerry.v1.exchange_pb2 import WatchStart


def event(time_s: float, position: int = 5, **kind: Any) -> v1.Event:
    """Returns an event of one kind that happened at `time_s`."""
    made = v1.Event(position=position, **kind)
    made.time.FromMilliseconds(round(time_s * 1000))
    return made


def learner(name: str = "us", *, is_live: bool = True, region: str = "", **report: Any) -> v1.LearnerStatus:
    """Returns a learner that has reported."""
    body = v1.LearnerReport(**{"step_count": 10, **report})
    return v1.LearnerStatus(learner_id=name, is_live=is_live, is_participating=True, region=region, report=body)


def started(*events: v1.Event, position: int = 4) -> RunHistory:
    """Returns the history of the open run "demo", whose only fragment has four parameters, after the events."""
    history = RunHistory()
    run = v1.Run(name="demo", status=v1.RUN_STATUS_OPEN, position=position)
    run.fragments.add(name="head", tensors=["w"])
    run.tensors.add(name="w", shape=[4])
    history.apply(WatchStart(run=run), 0.0)
    for message in events:
        history.apply(message)
    return history


def round_events(version: int, time_s: float, *names: str, position: int = 10) -> list[v1.Event]:
    """Returns a round: deltas of the learners a second apart, a close a second after the last, a commit after 0.5 s."""
    fates = [
        v1.DeltaFate(
            delta_id=f"{version}-{name}",
            fragment="head",
            learner_id=name,
            version=version,
            weight_share=1 / len(names),
            step_count=24,
            token_count=2400,
            size_bytes=1000,
        )
        for name in names
    ]
    deltas = [event(time_s + number, position, delta_accepted=fate) for number, fate in enumerate(fates)]
    closed = v1.RoundClosed(fragment="head", version=version, delta_ids=[fate.delta_id for fate in fates])
    committed = v1.VersionCommitted(
        version=v1.FragmentVersion(fragment="head", version=version),
        merged=fates,
        update_size_bytes=1500,
        participation=1.0,
        run_step_count=24.0 * version,
        run_token_count=2400.0 * version * len(names),
    )
    end_s = time_s + len(names)
    return [
        *deltas,
        event(end_s, position + 1, round_closed=closed),
        event(end_s + 0.5, position + 2, version_committed=committed),
    ]


def rounds(count: int, *names: str) -> list[v1.Event]:
    """Returns rounds of the learners, ten seconds apart from second 10 on."""
    return [message for number in range(1, count + 1) for message in round_events(number, 10.0 * number, *names)]
