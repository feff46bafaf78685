"""What a learner says of its exchange: each failure, and each cause of lost work, at most once a minute."""

from __future__ import annotations

from typing import Any

import numpy as np

from skerry.errors import PoisonedError, RunNotFoundError, StopExchangingError, error_of
from skerry.exchange.session import REMINDER_S, Session
from skerry.wire import FragmentLayout, TensorSpec
from tests.support.heard_logs import heard_logs
from tests.support.scripted_transport import ScriptedTransport, quick_calls, scripted_session

LAYOUT, OTHER = (FragmentLayout(name, (TensorSpec(name, (2,)),)) for name in ("f", "g"))
UNREACHABLE = error_of("UNREACHABLE", "no link")
QUARANTINED = PoisonedError("QUARANTINED", "norm is an outlier")


def session_of() -> Session:
    return scripted_session(quick_calls(ScriptedTransport()), {"w": np.zeros(2, np.float32)})


async def test_a_failure_is_told_at_once_and_then_once_a_minute() -> None:
    session = session_of()
    clock: Any = session.boundary.clock
    with heard_logs() as logs:
        for error in (UNREACHABLE, error_of("TIMEOUT", "slow"), UNREACHABLE):
            session.note_failure(error)
        clock.now_s += REMINDER_S
        session.note_failure(UNREACHABLE)
        assert session.problem is UNREACHABLE
    assert [line["reason"] for line in logs] == ["UNREACHABLE", "TIMEOUT", "UNREACHABLE"]


async def test_a_run_that_has_vanished_is_an_error_that_says_what_to_look_at() -> None:
    session = session_of()
    with heard_logs() as logs:
        session.note_failure(RunNotFoundError("RUN_NOT_FOUND", "no such run"))
    (line,) = logs
    assert (line["log_level"], line["run"], line["learner"]) == ("error", "fit", "us")
    assert "store is mounted" in line["because"]
    assert "store is mounted" in str(session.problem)


async def test_deltas_that_are_not_merged_are_counted_by_cause_and_told_once_a_minute() -> None:
    session = session_of()
    clock: Any = session.boundary.clock
    with heard_logs() as logs:
        for layout in (LAYOUT, OTHER, LAYOUT):
            session.not_merged(layout, "quarantined: norm", QUARANTINED, is_lost=True)
        session.not_merged(LAYOUT, "refused: BASE_STALE", error_of("BASE_STALE", "old"), is_lost=False)
        clock.now_s += REMINDER_S
        session.not_merged(LAYOUT, "quarantined: norm", QUARANTINED, is_lost=True)
    assert [(line["log_level"], line["cause"], line["deltas"]) for line in logs] == [
        ("error", "quarantined: norm", 1),
        ("warning", "refused: BASE_STALE", 1),
        ("error", "quarantined: norm", 4),
    ]
    assert session.tally.causes == {"quarantined: norm": 4, "refused: BASE_STALE": 1}
    assert (session.tally.deltas_dropped, session.tally.deltas_returned) == (4, 1)


async def test_a_fragment_that_is_not_merged_is_the_problem_though_another_is_acknowledged() -> None:
    session = session_of()
    session.not_merged(LAYOUT, "quarantined", QUARANTINED, is_lost=True)
    session.acknowledged(OTHER)
    assert session.standing_problem is QUARANTINED


async def test_the_first_reason_to_stop_stands_and_a_defect_is_one() -> None:
    session = session_of()
    with heard_logs() as logs:
        session.fail(ExceptionGroup("of tasks", [TypeError("a defect")]))
        failure = session.failure
        session.stop(StopExchangingError("SESSION_FENCED", "a newer one"))
    assert failure is not None
    assert session.failure is session.problem is failure
    assert (failure.reason, session.is_over) == ("DEFECT", True)
    assert "TypeError('a defect')" in str(failure)
    assert [line["event"] for line in logs] == ["the exchange has a defect", "exchange stopped, training goes on alone"]
