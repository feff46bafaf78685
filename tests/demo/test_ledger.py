"""What the log says of deltas and versions."""

from __future__ import annotations

import pytest

from skerry.demo.ledger import Ledger, read_ledger
from tests.demo.made_up_course import LOG, START_S, accepted, entry


def test_every_delta_has_the_fate_that_the_log_gives_it(ledger: Ledger) -> None:
    fates = {delta_id: delta.fate for delta_id, delta in ledger.deltas.items()}
    assert fates == {"a1": "merged", "b1": "merged", "a2": "merged", "c1": "expired", "b2": "superseded"}
    assert ledger.counts_by_fate() == {"merged": 3, "expired": 1, "superseded": 1}
    assert (ledger.merged_count, ledger.named_unmerged_count, ledger.pending_count) == (3, 2, 0)


def test_initial_weights_are_not_counted_as_a_delta(ledger: Ledger) -> None:
    assert "initial" not in ledger.deltas
    assert ledger.initial_position == 2
    assert ledger.final_position == 9


def test_a_round_that_was_closed_but_not_merged_leaves_its_deltas_pending() -> None:
    assert read_ledger(LOG[:6]).pending_count == 2


def test_an_item_that_the_fold_refused_had_no_effect() -> None:
    refused = {**accepted("a1-again", "us-east"), "rejection": {"reason": "BASE_REPEATED"}}
    assert set(read_ledger([*LOG[:3], entry(4, refused)]).deltas) == {"a1", "b1"}


def test_versions_have_their_time_position_and_size(ledger: Ledger) -> None:
    assert [(version.version, version.position, version.committed_at_unix_s) for version in ledger.versions] == [
        (1, 4, START_S + 2),
        (2, 7, START_S + 3.5),
    ]
    assert {version.size_bytes for version in ledger.versions} == {60}


def test_positions_to_judge_are_spread_over_time_and_end_with_the_last(ledger: Ledger) -> None:
    assert ledger.positions_to_judge(1) == [(7, START_S + 3.5)]
    assert [position for position, _ in ledger.positions_to_judge(5)] == [4, 7]
    assert read_ledger(LOG[:3]).positions_to_judge(5) == []


def test_a_line_that_is_no_entry_is_refused() -> None:
    with pytest.raises(ValueError, match="not a log entry"):
        read_ledger(['{"position": 1}'])
