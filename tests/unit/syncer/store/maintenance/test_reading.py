"""What `skerry log` says of entries."""

from __future__ import annotations

from skerry_syncer.store.log.entries import Decided, Fate, Item, MetricsItem, RunStatus, SessionItem, StatusItem
from skerry_syncer.store.log.state import Outcome
from skerry_syncer.store.maintenance.reading import entry_json, entry_rows
from tests.support.history import BODY, EMBED, History, accepted, closed, committed, snapshot


def history() -> History:
    """Returns an open run with two learners; the second session of one fences its first."""
    history = History()
    history.add(snapshot(0, EMBED), snapshot(0), StatusItem(RunStatus.OPEN, "anna"))
    history.add(SessionItem("m0", "m0-s1", ""), SessionItem("m1", "m1-s1", ""))
    history.add(accepted("a"), accepted("b", "m1"))
    history.add(SessionItem("m0", "m0-s2", ""))
    return history


ENTRIES: tuple[tuple[Item, ...], ...] = (
    (accepted("c"), accepted("d" * 32, session="m0-s2")),
    (closed("d" * 32, decided=(Decided("b", Fate.QUARANTINED, "too large"),)),),
    (committed(),),
)


def test_a_line_says_what_became_of_every_item_and_delta() -> None:
    log, lines = history(), []
    for items in ENTRIES:
        outcomes = log.add(*items)
        lines.append(entry_json(log.entry, outcomes, log.state))
    fenced, admitted = lines[0]["items"]
    assert (fenced["is_admitted"], fenced["rejection"], fenced["session"]) == (False, "SESSION_FENCED", "m0-s1")
    assert "newer session" in fenced["rejection_detail"]
    assert (admitted["is_admitted"], admitted["rejection"], admitted["kind"]) == (True, None, "accepted")
    fates = [{delta["delta"][0]: delta for delta in line["fates"]} for line in lines]
    assert [{name: delta["fate"] for name, delta in changed.items()} for changed in fates] == [
        {"d": "pending", "a": "superseded"},
        {"b": "quarantined"},
        {"d": "merged"},
    ]
    assert fates[0]["a"] == {
        "delta": "a",
        "fragment": BODY,
        "learner": "m0",
        "fate": "superseded",
        "version": None,
        "reason": "a newer session of the learner sent its own",
    }
    assert (fates[2]["d"]["version"], fates[1]["b"]["reason"]) == (1, "too large")


def test_a_row_has_an_items_facts_and_effect() -> None:
    log = history()
    rows = [row[3:] for items in ENTRIES for outcomes in [log.add(*items)] for row in entry_rows(log.entry, outcomes)]
    accepted_facts = "fragment=body, learner=m0, session=m0-s1, base_version=0, step_count=24, token_count=1000"
    assert rows[0] == ("accepted", f"delta=c, {accepted_facts}", "rejected: SESSION_FENCED")
    assert rows[1][1].startswith("delta=dddddddd, ")
    assert rows[1][2] == "1 superseded of m0: a newer session of the learner sent its own"
    facts = "fragment=body, version=1, attempt=0, members=1, participation=1.0, decided=1, length=24.0"
    assert rows[2] == ("closed", facts, "1 quarantined of m1: too large")
    assert rows[3] == ("committed", "fragment=body, version=1, attempt=0, update=1", "1 merged of m0")


def test_a_row_has_what_a_judge_reports() -> None:
    log = History.opened()
    item = MetricsItem("a" * 32, 3, "eval", {"loss": 3.25, "score": None})
    outcomes = log.add(item)
    ((*_, facts, effect),) = entry_rows(log.entry, outcomes)
    assert facts == "request_id=aaaaaaaa, position=3, judge=eval, loss=3.25, score=not finite"
    assert effect == ""


def test_a_row_names_who_changed_the_run() -> None:
    log = History()
    outcome = Outcome(StatusItem(RunStatus.OPEN, "anna"), None)
    log.add(outcome.item)
    assert [row[3:] for row in entry_rows(log.entry, (outcome,))] == [("status", "status=open, author=anna", "")]
