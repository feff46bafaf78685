"""What the pages say: every figure that nobody knows reads "no data", and names can't become markup."""

from __future__ import annotations

import re

from skerry.v1 import types_pb2 as v1
from skerry_console.view import Settings, events_html, sections, version_html
from tests.support.recorded_run import event, learner, round_events, rounds, started

PLAIN = Settings(prices={})


def kpis(html: str) -> dict[str, str]:
    return dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", html))


def test_a_run_without_learners_shows_no_zeros() -> None:
    shown = kpis(sections(started(), PLAIN, 100.0)["kpis"])
    unknown = {name for name, value in shown.items() if value == "no data"}
    assert unknown == {"merged loss", "tokens a second", "goodput", "versions an hour", "sent", "received"}
    assert shown["learners"] == "0 / 0 / 0"


def test_bytes_are_compared_with_data_parallel_training_and_cost_is_that_of_attached_hours() -> None:
    history = started(
        event(0.0, learner=learner(region="us-east", step_count=1000, received_bytes=3000)),
        *round_events(1, 100.0, "us"),
    )
    shown = sections(history, Settings(prices={"us-east": 36.0}), 200.0)["kpis"]
    assert kpis(shown)["received"] == "3.0 kB"
    assert "data-parallel: 2 times as much" in shown, "12 bits of 4 parameters in each of 1000 steps"
    assert kpis(shown)["cost"] == "2.00"


def test_a_syncer_that_does_not_answer_is_told_beside_the_time_of_what_is_shown() -> None:
    history = started(event(100.0, learner=learner()))
    headline = sections(history, PLAIN, 160.0, problem="reconnecting: the syncer ended the stream")["headline"]
    assert "as of 1970-01-01 00:01:40 UTC" in headline
    assert "the syncer ended the stream" in headline


def test_the_merged_loss_is_a_judges_and_what_to_type_is_code() -> None:
    metrics = {"accuracy": 0.5, "held_out_loss": 1.5}
    report = v1.MetricsReport(position=4, judge="eval", metrics=metrics, run_step_count=24, run_token_count=2400)
    shown = sections(started(event(3.0, metrics_reported=report)), PLAIN, 4.0)["kpis"]
    assert kpis(shown)["merged loss"] == "1.5000"
    assert "held_out_loss by eval" in shown
    assert "of <code>skerry judge</code>" in sections(started(), PLAIN, 4.0)["kpis"]


def test_a_slow_learner_is_told_with_what_it_costs_the_others() -> None:
    fast, slow = learner("fast"), learner("slow")
    fast.report.step_time.FromMilliseconds(100)
    slow.report.step_time.FromMilliseconds(300)
    parts = sections(started(event(1.0, learner=fast), event(1.0, learner=slow)), PLAIN, 2.0)
    assert "3.0 times slower than the fastest, which costs the others nothing" in parts["learner-slow"]
    assert "slower" not in parts["learner-fast"]


def test_a_learner_with_an_alert_is_marked() -> None:
    history = started(event(0.0, learner=learner("us")), event(90.0, learner=learner("eu")))
    parts = sections(history, PLAIN, 100.0)
    assert "troubled" in parts["learner-us"]
    assert "troubled" not in parts["learner-eu"]
    assert "us was last heard of 100 s ago" in parts["alerts"]


def test_a_silent_learners_card_is_sent_again_a_minute_and_not_a_second() -> None:
    history = started(event(0.0, learner=learner("us")))
    cards = [sections(history, PLAIN, now_s)["learner-us"] for now_s in (1.0, 20.0, 55.0, 181.0, 200.0)]
    assert [" now" in card or ">now" in card for card in cards] == [True, False, False, False, False]
    assert cards[1] == cards[2]
    assert "less than 2 min ago" in cards[1]
    assert cards[3] == cards[4]
    assert "3 min ago" in cards[3]


def test_events_are_found_by_words_and_paged_from_the_newest() -> None:
    history = started(*rounds(101, "us"))
    first, second = events_html(history, "", 0), events_html(history, "", 1)
    assert "version 101 by us" in first
    assert "303 events, page 1 of 4" in first
    assert "page 2 of 4" in second
    assert "1 events, page 1 of 1" in events_html(history, "VERSION 77 by", 0)
    assert "No event." in events_html(history, "eu", 0)


def test_a_version_says_who_made_it_when_and_how_to_go_back_to_it() -> None:
    history = started(*round_events(1, 100.0, "us", "eu"))
    report = v1.MetricsReport(position=12, judge="eval", metrics={"held-out": 1.75})
    history.apply(event(110.0, 15, metrics_reported=report))
    (version,) = history.versions
    html = version_html(history, version)
    facts = kpis(html)
    assert facts["made by"] == "a round of 2 deltas"
    assert (facts["the round waited"], facts["its last delta"]) == ("2.0 s", "of eu")
    assert facts["held-out (eval)"] == "1.7500"
    assert "<td>us</td><td>50%</td><td>24</td><td>2.4k</td><td>1.0 kB</td><td>0</td><td>+0 ms</td>" in html
    assert "skerry rollback demo --to 12" in html
    for message in round_events(2, 120.0, "us", position=20):
        history.apply(message)
    history.apply(event(130.0, 30, metrics_reported=v1.MetricsReport(position=25, judge="eval", metrics={"late": 1.5})))
    first, second = history.versions
    assert "late" not in version_html(history, first), "which is of another version"
    assert kpis(version_html(history, second))["late (eval)"] == "1.5000"
    assert "<button" not in html
    assert "data-action" in version_html(history, version, allows_actions=True)


def test_what_others_wrote_is_text() -> None:
    status = v1.LearnerStatus(learner_id="us", is_live=True, report=v1.LearnerReport(problem="<script>"))
    shown = sections(started(event(1.0, learner=status)), PLAIN, 2.0)
    assert "<script>" not in "".join(shown.values())
