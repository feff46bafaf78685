"""What the demo reads from the log: the store's own fold of it, with times."""

from __future__ import annotations

from skerry_demo.history import History
from skerry_syncer.store.log.entries import Fate
from tests.unit.demo.made_up_course import ENTRIES, START_S, accepted, written_history


def test_every_delta_has_the_fate_that_the_fold_gives_it(history: History) -> None:
    assert {delta.item.delta: delta.fate for delta in history.deltas} == {
        "a1": "merged",
        "b1": "merged",
        "a2": "merged",
        "c1": "expired",
        "b2": "superseded",
        "b3": "expired",
    }
    assert history.counts_by_fate() == {Fate.MERGED: 3, Fate.EXPIRED: 2, Fate.SUPERSEDED: 1}


def test_initial_weights_are_not_counted_as_a_delta(history: History) -> None:
    assert "initial" not in {delta.item.delta for delta in history.deltas}
    assert history.initial_position == 2
    assert history.state.position == 10


def test_a_round_that_was_closed_but_not_merged_leaves_its_deltas_pending() -> None:
    assert written_history(*ENTRIES[:7]).counts_by_fate()[Fate.PENDING] == 2


def test_an_item_that_the_fold_refused_had_no_effect() -> None:
    # One session may have one delta from a base: the second is in the log, because the append has an item that counts.
    history = written_history(*ENTRIES[:3], (accepted("a1", "us-east"), accepted("a1-again", "us-east")))
    assert [delta.item.delta for delta in history.deltas] == ["a1"]


def test_versions_are_in_log_order_with_their_times_and_updates(history: History) -> None:
    assert [(version.item.version, history.unix_s[version.position]) for version in history.versions] == [
        (1, START_S + 2.5),
        (2, START_S + 4),
    ]
    assert {part.size_bytes for version in history.versions for part in version.item.update} == {60}


def test_positions_to_judge_are_spread_over_time_and_end_with_the_last(history: History) -> None:
    assert history.positions_to_judge(1) == [8]
    assert history.positions_to_judge(5) == [5, 8]
    assert written_history(*ENTRIES[:3]).positions_to_judge(5) == []
