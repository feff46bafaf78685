"""What an observer makes of the events of a run, and what is shown of it."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from skerry.cli.watch_view import draw, sparkline
from skerry.history.run_history import RunHistory, learner_state, unmerged_text
from skerry.history.series import Point, Series
from skerry.v1 import types_pb2 as v1
from skerry.v1.exchange_pb2 import WatchStart
from skerry.v1.runs_pb2 import VersionRecord
from tests.support import recorded_run as recorded


def report(learner_id: str, *, sent_bytes: int = 0, **figures: Any) -> v1.Event:
    """Returns the event of a learner's report."""
    body = v1.LearnerReport(step_count=10, sent_bytes=sent_bytes, received_bytes=2 * sent_bytes, **figures)
    return v1.Event(position=5, learner=v1.LearnerStatus(learner_id=learner_id, is_live=True, report=body))


def started(*learners: v1.LearnerStatus) -> RunHistory:
    """Returns the state of a run with one fragment, at version 3."""
    run = v1.Run(
        name="demo",
        status=v1.RUN_STATUS_OPEN,
        position=4,
        tensors=[v1.Tensor(name="w", shape=[30, 50])],
        fragments=[v1.Fragment(name="head", tensors=["w"])],
        versions=[v1.FragmentVersion(fragment="head", version=3)],
    )
    state = RunHistory()
    state.apply(WatchStart(run=run, learners=learners), 0.0)
    return state


def test_bandwidth_is_a_mean_over_the_last_reports_and_begins_anew_with_the_learner() -> None:
    state = started()

    def rates(*sent_bytes: int, from_s: int) -> tuple[float, float] | None:
        for second, sent in enumerate(sent_bytes, from_s):
            state.apply(report("us", sent_bytes=sent), float(second))
        return state.learners["us"].bits_per_s

    assert rates(1_000_000, from_s=0) is None
    assert rates(1_000_125, from_s=1) == (1000, 2000)
    assert rates(*[2_000_000] * 6, from_s=2) == (0, 0)
    assert rates(10, from_s=8) is None
    assert rates(135, from_s=9) == (1000, 2000)


def test_bandwidth_begins_anew_with_a_learner_that_had_sent_nothing() -> None:
    state = started()
    for second, received_bytes in enumerate((9_000, 1_000, 1_125)):
        body = v1.LearnerReport(step_count=10, received_bytes=received_bytes)
        status = v1.LearnerStatus(learner_id="us", is_live=True, report=body)
        state.apply(v1.Event(position=5, learner=status), float(second))
    assert state.learners["us"].bits_per_s == (0, 1000)


def test_before_a_second_report_bandwidth_is_the_mean_of_all_steps() -> None:
    body = v1.LearnerReport(step_count=100, sent_bytes=1_000_000)
    body.step_time.FromMilliseconds(500)
    state = started(v1.LearnerStatus(learner_id="us", is_live=True, report=body))
    assert state.learners["us"].bits_per_s == pytest.approx((160_000, 0))


def test_a_learner_is_as_stale_as_its_stalest_fragment() -> None:
    state = started()
    state.apply(report("us", adopted=[v1.FragmentVersion(fragment="head", version=1)]), 1.0)
    assert state.staleness(state.learners["us"]) == 2


def test_a_commit_is_told_with_who_took_part() -> None:
    state = started()
    merged = [v1.DeltaFate(learner_id="us", weight_share=0.75), v1.DeltaFate(learner_id="eu", weight_share=0.25)]
    committed = v1.VersionCommitted(version=v1.FragmentVersion(fragment="head", version=4), merged=merged)
    text = state.apply(v1.Event(position=9, version_committed=committed))
    assert text == "head is at version 4 by us 75%, eu 25%"
    assert state.fragments["head"].version == 4
    assert (state.position, [(event.position, event.text) for event in state.events]) == (9, [(9, text)])


def test_a_learner_is_told_when_it_attaches_and_not_at_each_report() -> None:
    state = started()
    anew = v1.Event(position=6, learner=v1.LearnerStatus(learner_id="us", is_live=True))
    lines = [state.apply(event) for event in (report("us", sent_bytes=1), report("us", sent_bytes=2), anew, anew)]
    assert lines == ["us attached", None, "us attached", None]


def test_a_problem_is_told_when_it_comes_and_when_it_goes_also_if_it_was_there_before() -> None:
    def said(problem: str) -> v1.LearnerStatus:
        return v1.LearnerStatus(
            learner_id="us", is_live=True, report=v1.LearnerReport(problem=problem, unsent_step_count=40)
        )

    state = started(said("STORE_FULL"))
    events = [v1.Event(position=5, learner=said(problem)) for problem in ("STORE_FULL", "STORE_FULL", "", "")]
    lines = [state.apply(event, 1.0) for event in events]
    assert lines == ["us reports STORE_FULL, 40 steps unsent", None, "us delivers again", None]


def test_finished_and_lost_learners_differ_and_keep_their_figures() -> None:
    state = started()
    for name in ("done", "lost"):
        state.apply(report(name, sent_bytes=9), 1.0)
    left = v1.Event(
        position=6, learner=v1.LearnerStatus(learner_id="done", has_left=True)
    )  # the log's event has no report
    lost = v1.Event(position=6, learner=v1.LearnerStatus(learner_id="lost", report=v1.LearnerReport(step_count=10)))
    lines = [state.apply(event, 2.0) for event in (left, lost)]
    assert lines == ["done has finished", "lost is lost: its lease ran out"]
    assert [learner_state(view.status) for view in state.learners.values()] == ["finished", "lost"]
    reports = [view.status.report for view in state.learners.values()]
    assert [report.step_count for report in reports] == [10, 10]


def test_what_was_not_merged_is_told_with_its_causes_the_most_frequent_first() -> None:
    fates = (
        v1.FateCount(fate=v1.FATE_MERGED, delta_count=125),
        v1.FateCount(fate=v1.FATE_EXPIRED, reason="staler than the policy allows", delta_count=7),
        v1.FateCount(fate=v1.FATE_QUARANTINED, reason="norm is an outlier", delta_count=30),
    )
    assert unmerged_text(fates) == (
        "37 of 162 deltas were not merged: 30 quarantined (norm is an outlier), "
        "7 expired (staler than the policy allows)"
    )
    assert unmerged_text(fates[:1]) == ""


def test_a_version_knows_how_long_its_round_waited_and_for_whom() -> None:
    us = [recorded.event(90, learner=recorded.learner(name)) for name in ("us", "eu")]
    history = recorded.started(*us, *recorded.round_events(1, 100.0, "us", "eu"))
    (version,) = history.versions
    assert (version.opened_at_s, version.waited_s, version.committed_at_s) == (100.0, 2.0, 102.5)
    assert version.last_delta is not None
    assert version.last_delta.learner_id == "eu"
    assert [delta.learner_id for delta in version.deltas] == ["us", "eu"]
    assert version.update_size_bytes == 1500


def test_the_learners_shares_of_the_weight_add_up_to_one() -> None:
    us = [recorded.event(90, learner=recorded.learner(name)) for name in ("us", "eu")]
    rounds = [*recorded.round_events(1, 100.0, "us", "eu"), *recorded.round_events(2, 110.0, "us")]
    history = recorded.started(*us, *rounds)
    assert {name: learner.share for name, learner in history.learners.items()} == {"us": 0.75, "eu": 0.25}


def test_goodput_is_what_was_merged_of_what_was_trained() -> None:
    trained = recorded.event(90, learner=recorded.learner(step_count=96))
    history = recorded.started(trained, *recorded.round_events(1, 100.0, "us"), *recorded.round_events(2, 110.0, "us"))
    assert history.goodput() == 0.5
    assert recorded.started(trained).goodput() is None, "nothing is known before the first version"
    history.apply(recorded.event(120, learner=recorded.learner(step_count=0)))
    history.apply(recorded.event(121, learner=recorded.learner(step_count=96)))
    assert history.goodput() == 0.25, "a learner that is started again has trained before"


def test_rates_are_those_of_the_last_minutes() -> None:
    history = recorded.started(recorded.event(5, learner=recorded.learner()), *recorded.rounds(60, "us"))
    assert history.tokens_per_s(history.now_s) == pytest.approx(240.0)
    assert history.tokens_per_s(history.now_s + 1000.0) == 0, "nothing was merged since"
    assert history.versions_per_hour(history.now_s) == pytest.approx(360.0)


def test_a_rollback_abandons_versions_and_names_its_author() -> None:
    rolled = v1.RolledBack(
        versions=[v1.FragmentVersion(fragment="head", version=4)], source_versions=[1], target_position=12, author="ops"
    )
    history = recorded.started(*recorded.rounds(3, "us"), recorded.event(200, 20, rolled_back=rolled))
    assert [view.is_abandoned for view in history.versions] == [False, True, True, False]
    assert history.events[-1].text == "rolled back 1 fragments to their content at position 12 by ops"


def test_an_ejection_names_its_author_and_shows_until_the_learner_attaches_again() -> None:
    history = recorded.started(recorded.event(90, learner=recorded.learner()))
    ejected = v1.EjectionChanged(learner_id="us", is_ejected=True, author="skerry://admin/anna")
    assert history.apply(recorded.event(100, ejection_changed=ejected)) == "us was ejected by skerry://admin/anna"
    after = v1.LearnerStatus(learner_id="us", has_left=True, is_ejected=True, report=v1.LearnerReport(step_count=12))
    assert history.apply(recorded.event(101, learner=after)) is None, "it is told once"
    us = history.learners["us"]
    assert (learner_state(us.status), history.learner_counts(), us.attached_s(200.0)) == ("ejected", (0, 0, 0), 10.0)
    history.apply(recorded.event(110, ejection_changed=v1.EjectionChanged(learner_id="us")))
    assert (history.events[-1].text, learner_state(us.status)) == ("us was readmitted", "finished")
    history.apply(recorded.event(120, learner=v1.LearnerStatus(learner_id="us", is_live=True)))
    assert learner_state(us.status) == "live"


def test_the_past_says_what_learners_did_and_not_what_they_do() -> None:
    history = recorded.started(position=9)
    history.apply(WatchStart(run=v1.Run(name="demo", position=9), learners=[recorded.learner(is_live=False)]), 50.0)
    text = history.apply(recorded.event(20, 6, learner=v1.LearnerStatus(learner_id="us", is_live=True)))
    assert text == "us attached"
    assert learner_state(history.learners["us"].status) == "lost"


def test_a_long_curve_keeps_its_ends_and_its_newest_points() -> None:
    series = Series()
    for number in range(10_000):
        series.add(Point(float(number), number, number, float(number)))
    times_s = [point.time_s for point in series]
    assert len(times_s) <= 1000
    assert (times_s[0], times_s[-500:]) == (0.0, [float(number) for number in range(9500, 10_000)])


def shown(state: RunHistory, now_s: float | None = None) -> str:
    screen = Console(file=io.StringIO(), width=200)
    screen.print(draw(state, now_s=now_s))
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def test_a_view_tells_live_from_participating_and_how_versions_were_made() -> None:
    learners = [v1.LearnerStatus(learner_id=name, is_live=True, is_participating=name == "us") for name in ("eu", "us")]
    state = started(*learners)
    merged = [v1.DeltaFate(learner_id="us", weight_share=1.0, staleness=1)]
    version = v1.FragmentVersion(fragment="head", version=3)
    state.apply_version(VersionRecord(version=version, merged=merged, update_size_bytes=1500, participation=0.75))
    lines = {line.split()[0]: line.split()[1:] for line in shown(state).splitlines() if line.strip()}
    assert lines["demo"] == ["open", "position", "4", "2", "live,", "1", "participating"]
    assert (lines["eu"][1], lines["us"][1]) == ("live", "participating")
    assert lines["head"] == ["1.5k", "3", "1", "1", "75%", "1.5", "kB"]


def test_a_view_begins_with_what_is_wrong_and_what_judges_report() -> None:
    report = v1.MetricsReport(judge="eval", position=5, run_step_count=5, metrics={"held-out": 1.25})
    state = recorded.started(
        recorded.event(100, learner=recorded.learner()), recorded.event(101, metrics_reported=report)
    )
    _, alert, judged, *_ = shown(state, 200.0).splitlines()
    assert alert == "us was last heard of 100 s ago"
    assert judged == "held-out 1.2500 of the merged model, by eval"


def test_a_sparkline_spans_its_own_range() -> None:
    assert sparkline([1.0, 0.5, 0.0]) == "█▅▁"
    assert sparkline([1.0]) == ""
    assert sparkline([2.0, 2.0]) == "▁▁"


def test_the_past_of_a_learner_that_came_back_counts_only_while_it_was_attached() -> None:
    history = recorded.started(position=20)
    history.apply(recorded.event(5000, 20, learner=recorded.learner()), 5000.0)
    for position, time_s, is_live in ((5, 1000, True), (6, 1600, False), (7, 4000, True)):
        status = v1.LearnerStatus(learner_id="us", is_live=is_live, has_left=not is_live)
        history.apply(recorded.event(time_s, position, learner=status))
    assert history.learners["us"].attached_s(5000.0) == 1600.0
