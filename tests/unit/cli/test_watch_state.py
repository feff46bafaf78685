"""What an observer makes of the events of a run."""

from __future__ import annotations

from skerry.cli.watch_state import WatchState, learner_state, unmerged_text
from skerry.cli.watch_view import sparkline
from skerry.v1 import types_pb2 as v1
from skerry.v1.exchange_pb2 import WatchStart
from skerry.v1.types_pb2 import (
    DeltaFate,
    Event,
    FateCount,
    Fragment,
    FragmentVersion,
    LearnerReport,
    LearnerStatus,
    Run,
    VersionCommitted,
)


def report(learner_id: str, *, sent_bytes: int, version: int = 0, loss: float = 1.0) -> Event:
    """Returns the event of a learner's report."""
    body = LearnerReport(
        step_count=10,
        sent_bytes=sent_bytes,
        received_bytes=2 * sent_bytes,
        loss=loss,
        adopted=[FragmentVersion(fragment="head", version=version)],
    )
    status = LearnerStatus(learner_id=learner_id, is_live=True, report=body)
    return Event(position=5, learner=status)


def started() -> WatchState:
    """Returns the state of a run with one fragment, at version 3."""
    run = Run(
        name="demo",
        status=v1.RUN_STATUS_OPEN,
        position=4,
        fragments=[Fragment(name="head")],
        versions=[FragmentVersion(fragment="head", version=3)],
    )
    state = WatchState()
    state.apply(WatchStart(run=run), 0.0)
    return state


def up(state: WatchState) -> float | None:
    """Returns the bandwidth of the deltas of the learner us."""
    return state.learners["us"].up_bits_per_s


def test_bandwidth_is_what_two_reports_imply() -> None:
    state = started()
    state.apply(report("us", sent_bytes=1_000_000), 100.0)
    assert up(state) is None
    state.apply(report("us", sent_bytes=1_500_000), 102.0)
    assert up(state) == 2_000_000
    assert state.learners["us"].down_bits_per_s == 4_000_000


def test_bandwidth_forgets_what_is_long_past() -> None:
    state = started()
    for second in range(60):
        state.apply(report("us", sent_bytes=1_000_000 if second < 30 else 1_000_000 + 125 * (second - 30)), second)
    assert up(state) == 1000


def test_a_learner_that_starts_anew_counts_from_zero_again() -> None:
    state = started()
    state.apply(report("us", sent_bytes=1_000_000), 1.0)
    state.apply(report("us", sent_bytes=10), 2.0)
    assert up(state) is None
    state.apply(report("us", sent_bytes=135), 3.0)
    assert up(state) == 1000


def test_a_learner_is_as_stale_as_its_stalest_fragment() -> None:
    state = started()
    state.apply(report("us", sent_bytes=0, version=1), 1.0)
    assert state.staleness(state.learners["us"]) == 2


def test_a_commit_is_told_with_who_took_part() -> None:
    state = started()
    merged = (
        DeltaFate(learner_id="us", weight_share=0.75),
        DeltaFate(learner_id="eu", weight_share=0.25, staleness=2),
    )
    committed = VersionCommitted(
        version=FragmentVersion(fragment="head", version=4), merged=merged, participation=0.5, update_size_bytes=100
    )
    line = state.apply(Event(position=9, version_committed=committed), 1.0)
    assert line is not None
    assert line.text == "head is at version 4 by us 75%, eu 25%"
    head = state.fragments["head"]
    assert (head.version, head.contributor_count, head.max_staleness, head.participation) == (4, 2, 2, 0.5)
    assert state.position == 9


def test_a_report_alone_is_no_event_to_tell() -> None:
    state = started()
    assert state.apply(report("us", sent_bytes=0), 1.0) is not None, "the learner has come"
    assert state.apply(report("us", sent_bytes=9), 2.0) is None


def test_a_problem_is_told_when_it_comes_and_when_it_goes_also_if_it_was_there_before() -> None:
    def said(problem: str) -> LearnerStatus:
        return LearnerStatus(learner_id="us", is_live=True, report=LearnerReport(problem=problem, unsent_step_count=40))

    state = started()
    state.apply(WatchStart(run=Run(name="demo"), learners=[said("STORE_FULL")]), 0.0)
    events = [Event(position=5, learner=said(problem)) for problem in ("STORE_FULL", "STORE_FULL", "", "")]
    lines = [state.apply(event, 1.0) for event in events]
    assert [line.text if line else "" for line in lines] == [
        "us reports STORE_FULL, 40 steps unsent",
        "",
        "us delivers again",
        "",
    ]


def test_a_run_that_closes_is_closed() -> None:
    state = started()
    state.apply(Event(position=9, status_changed=v1.RUN_STATUS_CLOSED), 1.0)
    assert state.is_closed


def test_a_sparkline_spans_its_own_range() -> None:
    assert sparkline([1.0, 0.5, 0.0]) == "█▅▁"
    assert sparkline([1.0]) == ""
    assert sparkline([2.0, 2.0]) == "▁▁"


def test_a_learner_that_attaches_anew_is_told_once() -> None:
    state = started()
    anew = Event(position=6, learner=LearnerStatus(learner_id="us", is_live=True))
    lines = [state.apply(event, 1.0) for event in (report("us", sent_bytes=1), report("us", sent_bytes=2), anew, anew)]
    assert [line.text if line else "" for line in lines] == ["us attached", "", "us attached", ""]


def test_finished_and_lost_learners_differ_and_keep_their_figures() -> None:
    state = started()
    for name in ("done", "lost"):
        state.apply(report(name, sent_bytes=9), 1.0)
    left = Event(position=6, learner=LearnerStatus(learner_id="done", has_left=True))  # the log's event has no report
    lost = Event(position=6, learner=LearnerStatus(learner_id="lost", report=LearnerReport(step_count=10)))
    lines = [state.apply(event, 2.0) for event in (left, lost)]
    assert [line.text if line else "" for line in lines] == ["done has finished", "lost is lost: its lease ran out"]
    assert [learner_state(view.status) for view in state.learners.values()] == ["finished", "lost"]
    reports = [view.status.report for view in state.learners.values()]
    assert [report.step_count for report in reports] == [10, 10]


def test_what_was_not_merged_is_told_with_its_causes_the_most_frequent_first() -> None:
    fates = (
        FateCount(fate=v1.FATE_MERGED, delta_count=125),
        FateCount(fate=v1.FATE_EXPIRED, reason="staler than the policy allows", delta_count=7),
        FateCount(fate=v1.FATE_QUARANTINED, reason="norm is an outlier", delta_count=30),
    )
    assert unmerged_text(fates) == (
        "37 of 162 deltas were not merged: 30 quarantined (norm is an outlier), "
        "7 expired (staler than the policy allows)"
    )
    assert unmerged_text(fates[:1]) == ""


def test_before_a_second_report_bandwidth_is_the_mean_of_all_steps() -> None:
    state = started()
    body = LearnerReport(step_count=100, sent_bytes=1_000_000)
    body.step_time.FromMilliseconds(500)
    learner = LearnerStatus(learner_id="us", is_live=True, report=body)
    state.apply(WatchStart(run=Run(name="demo"), learners=[learner]), 0.0)
    assert up(state) == 160_000
