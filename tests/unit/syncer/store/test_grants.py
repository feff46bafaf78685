"""What a learner was granted at its enrolment, as the log carries it: fold, checkpoint and older levels."""

from __future__ import annotations

import json

import pytest

from skerry_syncer.store.log.entries import (
    ENTRY_FORMAT,
    GRANTS_FORMAT,
    LeftItem,
    LevelItem,
    RunStatus,
    SessionItem,
    StatusItem,
    item_to_json,
)
from skerry_syncer.store.log.saved import state_from_bytes, state_to_bytes
from tests.unit.syncer.store.test_fold import EMBED, SPEC, History, snapshot


def opened(level: int) -> History:
    """Returns an open run of a level."""
    made = History()
    made.admit(LevelItem(level))
    for item in (snapshot(0, EMBED), snapshot(0), StatusItem(RunStatus.OPEN)):
        made.admit(item)
    return made


def attached(session: str, weight: float | None = None, learner: str = "m0") -> SessionItem:
    return SessionItem(learner, session, "here", weight=weight)


def test_a_learner_has_the_grant_of_its_newest_session() -> None:
    history = opened(ENTRY_FORMAT)
    history.admit(attached("s1", 8.0))
    history.admit(attached("s1", 1.5, "m1"))
    assert history.state.grants == {"m0": 8.0, "m1": 1.5}
    history.admit(attached("s2", 4.0))
    assert history.state.grants == {"m0": 4.0, "m1": 1.5}
    history.admit(attached("s3"))
    assert history.state.grants == {"m1": 1.5}


def test_an_attached_session_attaches_again_for_another_grant_alone_and_that_is_all_it_changes() -> None:
    history = opened(ENTRY_FORMAT)
    history.admit(attached("s1", 8.0))
    learner = history.state.learners["m0"]
    before = repr(learner)
    assert history.reject(attached("s1", 8.0)) == "REPEATED"
    history.admit(attached("s1", 2.5))
    assert (history.state.grants, repr(learner)) == ({"m0": 2.5}, before)
    history.admit(attached("s1"))
    assert (history.state.grants, repr(learner)) == ({}, before)
    assert history.reject(attached("s1")) == "REPEATED"
    history.admit(LeftItem("m0", "s1"))
    history.admit(attached("s1", 8.0))
    assert (history.state.grants, repr(learner)) == ({"m0": 8.0}, before), "to leave and come back is no news"


def test_a_fenced_session_is_granted_nothing() -> None:
    history = opened(ENTRY_FORMAT)
    history.admit(attached("s1", 2.5))
    history.admit(attached("s2"))
    assert history.reject(attached("s1", 8.0)) == "SESSION_FENCED"
    assert history.state.grants == {}


@pytest.mark.parametrize("weight", [-8.0, 0.0, 0.5, 1000.5, 1e300])
def test_a_weight_out_of_its_range_has_no_effect(weight: float) -> None:
    history = opened(ENTRY_FORMAT)
    assert history.reject(attached("s1", weight)) == "BAD_REQUEST"
    history.admit(attached("s1", 1000.0))
    history.admit(attached("s1", 1.0))


def test_below_its_level_a_weight_counts_for_nothing_until_the_level_is_raised() -> None:
    history = opened(GRANTS_FORMAT - 1)
    history.admit(attached("s1", 8.0))
    assert history.state.grants == {}
    assert history.reject(attached("s1", 8.0)) == "REPEATED"
    history.admit(attached("s2", 5000.0))
    history.admit(LevelItem(GRANTS_FORMAT))
    assert history.state.grants == {}
    history.admit(attached("s2", 8.0))
    assert history.state.grants == {"m0": 8.0}


def test_without_a_grant_the_log_and_a_checkpoint_have_no_word_of_it() -> None:
    assert "weight" not in item_to_json(attached("s1"))
    assert item_to_json(attached("s1", 8.0))["weight"] == 8.0
    history = opened(ENTRY_FORMAT)
    history.admit(attached("s1"))
    assert "grants" not in json.loads(state_to_bytes(history.state))


def test_a_checkpoint_keeps_grants() -> None:
    history = opened(ENTRY_FORMAT)
    history.admit(attached("s1", 8.0))
    history.admit(attached("s1", learner="m1"))
    data = state_to_bytes(history.state)
    assert json.loads(data)["grants"] == {"m0": 8.0}
    again = state_from_bytes(data, SPEC)
    assert again.grants == {"m0": 8.0}
    assert state_to_bytes(again) == data
