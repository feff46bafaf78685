"""Which reports of a judge fail a run's gate, and what the fold asks for because of them."""

from dataclasses import replace

import pytest

from skerry.wire.policy import Gate, Policy
from skerry_syncer.store.log.checkpoints import state_from_bytes, state_to_bytes
from skerry_syncer.store.log.entries import CollectedItem, MetricsItem, PolicyItem, RunStatus, StatusItem
from tests.support.history import BODY, SPEC, History, accepted, committed_round, rolled_back, snapshot

GATE = Gate("eval", "loss", margin=0.1, rolls_back=True)
Value = float | None


@pytest.fixture
def history() -> History:
    history = History.opened()
    history.admit(PolicyItem("gate", Policy(gate=GATE)))
    return history


def report(history: History, value: Value, *, position: int = 0, judge: str = "eval", name: str = "loss") -> int:
    """Adds a report, of the newest version; returns the position that it is about."""
    position = position or history.state.position
    history.admit(MetricsItem(f"{history.state.position:032x}", position, judge, {name: value}))
    return position


def better_positions(history: History) -> list[int]:
    return [each.better_position for each in history.state.reports.values()]


def target(history: History) -> int | None:
    asked = history.state.asked_rollback
    return None if asked is None else asked.target_position


def test_a_metric_may_be_worse_than_the_best_of_the_last_reports_by_the_margin(history: History) -> None:
    best = [report(history, value) for value in (3.5, 3.0, 3.05)][1]
    report(history, 3.1)
    assert (better_positions(history), target(history)) == ([0, 0, 0, 0], None)
    failed = report(history, 3.2)
    assert better_positions(history)[-1] == best
    asked = history.state.asked_rollback
    assert asked is not None
    assert (asked.target_position, asked.failed_position) == (best, failed)
    assert asked.author == "gate: judge=eval, metric=loss"


def test_what_is_not_finite_is_worse_than_all_and_the_last_of_equal_reports_is_the_target(history: History) -> None:
    positions = [report(history, value) for value in (3.0, 3.0, None)]
    assert target(history) == positions[1]


def test_without_anything_finite_to_compare_with_nothing_fails(history: History) -> None:
    for value in (None, None, 3.0):
        report(history, value)
    assert better_positions(history) == [0, 0, 0]


def test_a_score_fails_when_it_falls(history: History) -> None:
    history.admit(PolicyItem("score", Policy(gate=replace(GATE, higher_is_better=True))))
    first = report(history, 0.5)
    for value in (0.9, 0.85, 0.7):
        report(history, value)
    assert better_positions(history) == [0, 0, 0, first + 1]


def test_only_the_last_reports_count(history: History) -> None:
    history.admit(PolicyItem("short", Policy(gate=replace(GATE, window_count=2))))
    for value in (1.0, 3.0, 3.0, 3.0):
        report(history, value)
    assert [bool(position) for position in better_positions(history)] == [False, True, True, False]


@pytest.mark.parametrize("gate", [Gate(), replace(GATE, rolls_back=False)])
def test_without_a_gate_that_rolls_back_nothing_is_asked_for(history: History, gate: Gate) -> None:
    history.admit(PolicyItem("other", Policy(gate=gate)))
    first = report(history, 3.0)
    report(history, 9.0)
    assert (better_positions(history), target(history)) == ([0, first if gate.judge else 0], None)


def test_another_judge_another_metric_and_an_older_position_are_not_compared(history: History) -> None:
    first = report(history, 3.0)
    report(history, 9.0, judge="other")
    report(history, 9.0, name="score")
    report(history, 9.0, position=first - 1)
    assert (better_positions(history), target(history)) == ([0, 0, 0, 0], None)


def trained(history: History, version: int) -> None:
    history.admit(accepted(f"d{version}", base=version - 1))
    committed_round(history, f"d{version}", version=version)


def test_a_roll_back_abandons_reports_and_what_came_before_it_is_asked_for_no_longer(history: History) -> None:
    best = report(history, 3.0)
    trained(history, 1)
    bad = report(history, 9.0)
    worse = report(history, 10.0)
    asked = history.state.asked_rollback
    assert asked is not None
    assert asked.failed_position == bad, "the first one asks for it"
    item = rolled_back(asked.request_id, 0, 2)
    history.admit(type(item)(asked.request_id, best, item.fragments, asked.author))
    reports = {each.item.position: each.is_abandoned for each in history.state.reports.values()}
    assert (reports, target(history)) == ({best: False, bad: True, worse: True}, None)
    report(history, 11.0, position=bad)
    assert (list(history.state.reports.values())[-1].is_abandoned, target(history)) == (True, None)
    report(history, 3.05)
    assert (better_positions(history)[-1], target(history)) == (0, None)


def test_a_change_of_the_gate_withdraws_what_it_asked_for(history: History) -> None:
    report(history, 3.0)
    report(history, 9.0)
    history.admit(PolicyItem("quorum", Policy(gate=GATE, quorum_count=2)))
    assert target(history)
    history.admit(PolicyItem("off", Policy()))
    assert target(history) is None


def test_a_target_whose_weights_are_gone_gives_way_to_that_of_the_next_failed_report(history: History) -> None:
    gone = report(history, 3.0)
    trained(history, 1)
    history.admit(snapshot(1))
    report(history, 9.0)
    assert target(history) == gone
    history.admit(CollectedItem((f"snapshots/{BODY}/0",)))
    best = report(history, 2.0)
    report(history, 9.0)
    assert target(history) == best


def test_a_closed_run_takes_reports_and_is_not_rolled_back(history: History) -> None:
    first = report(history, 3.0)
    for status in (RunStatus.CLOSING, RunStatus.CLOSED):
        history.admit(StatusItem(status))
    report(history, 9.0)
    assert (better_positions(history)[-1], target(history)) == (first, None)


def test_a_report_counts_once_and_is_about_a_position_that_the_log_has(history: History) -> None:
    report(history, 3.0)
    (request_id,) = history.state.reports
    assert history.reject(MetricsItem(request_id, 3, "eval", {"loss": 2.0})) == "ID_REUSED"
    assert history.reject(MetricsItem("new", history.state.position + 9, "eval", {"loss": 2.0})) == "VERSION_NOT_FOUND"
    assert history.reject(MetricsItem("new", 0, "eval", {"loss": 2.0})) == "VERSION_NOT_FOUND"
    assert History().reject(MetricsItem("new", 1, "eval", {"loss": 2.0})) == "RUN_DRAFT"


def test_reports_have_the_progress_at_their_position_and_the_oldest_are_dropped(history: History) -> None:
    before = history.state.position
    trained(history, 1)
    report(history, 3.0, position=before)
    report(history, 2.9)
    steps = [each.step_count for each in history.state.reports.values()]
    assert steps == [0.0, history.state.step_count]
    assert history.state.fragments[BODY].newest.step_count > 0
    for _ in range(300):
        report(history, 2.9)
    assert len(history.state.reports) == 256
    assert steps[0] not in [each.step_count for each in history.state.reports.values()]
    report(history, 9.0)
    copy = state_from_bytes(state_to_bytes(history.state), SPEC)
    assert (copy.reports, copy.asked_rollback) == (history.state.reports, history.state.asked_rollback)
    assert copy.asked_rollback is not None
