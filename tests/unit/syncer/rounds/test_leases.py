"""Leases are renewed by changes that this replica sees, and timed by its own clock."""

from __future__ import annotations

import pytest

from skerry.wire.policy import Policy
from skerry_syncer.rounds.leases import Leases
from skerry_syncer.rounds.membership import LearnerReport, LearnerView
from skerry_syncer.store.log.entries import LeftItem, SessionItem
from tests.unit.syncer.rounds.round_world import RoundWorld

TERM_S = Policy().lease_term_s


def _session(world: RoundWorld, learner: str) -> str:
    return world.state.learners[learner].session


def _is_live(membership: Leases, world: RoundWorld, learner: str, now_s: float) -> bool:
    return membership.view(world.state, now_s).of(learner).is_live


def test_a_lease_lives_for_a_term_after_its_last_sign() -> None:
    world, membership = RoundWorld("eu"), Leases(0.0)
    assert not _is_live(membership, world, "eu", 0.0)
    membership.renew("eu", _session(world, "eu"), 10.0)
    assert _is_live(membership, world, "eu", 10.0 + 0.99 * TERM_S)
    assert not _is_live(membership, world, "eu", 10.0 + TERM_S)


def test_a_report_of_a_fenced_session_renews_nothing() -> None:
    world, membership = RoundWorld("eu"), Leases(0.0)
    older = _session(world, "eu")
    world.add(SessionItem("eu", "f" * 32, ""))
    membership.renew("eu", older, 10.0)
    assert not _is_live(membership, world, "eu", 10.0)


def test_a_learner_that_left_is_not_live_and_other_replicas_hear_its_last_report() -> None:
    world, here, there = RoundWorld("eu"), Leases(0.0), Leases(0.0)
    session = _session(world, "eu")
    here.renew("eu", session, 10.0, LearnerReport(step_count=1500))
    world.add(LeftItem("eu", session))
    here.end("eu", session)
    assert not _is_live(here, world, "eu", 10.0)
    for learner, advice in here.unpublished():
        there.hear(learner, advice, 10.0)
    assert there.view(world.state, 10.0).of("eu") == LearnerView(False, LearnerReport(step_count=1500))


def test_another_replicas_advice_renews_when_it_changes_and_not_before() -> None:
    world, here, there = RoundWorld("eu"), Leases(0.0), Leases(0.0)
    session = _session(world, "eu")
    there.renew("eu", session, 1.0, LearnerReport(step_count=5, step_time_s=0.5))
    ((_, first),) = there.unpublished()
    here.hear("eu", first, 100.0)
    assert not _is_live(here, world, "eu", 100.0), "who knows how old it was"
    there.renew("eu", session, 2.0, LearnerReport(step_count=6, step_time_s=0.5))
    ((_, second),) = there.unpublished()
    here.hear("eu", second, 102.0)
    assert _is_live(here, world, "eu", 102.0)
    assert here.view(world.state, 102.0).of("eu").report == LearnerReport(step_count=6, step_time_s=0.5)


def test_what_was_not_renewed_is_not_told_again() -> None:
    world, membership = RoundWorld("eu", "us"), Leases(0.0)
    membership.renew("eu", _session(world, "eu"), 1.0)
    assert [learner for learner, _ in membership.unpublished()] == ["eu"]
    assert membership.unpublished() == ()


_OF_LATER_FORMAT = b'{"format":99,"session":"a","report":{}}'


@pytest.mark.parametrize("advice", [b"", b"[]", b"not json", _OF_LATER_FORMAT])
def test_advice_that_is_not_readable_changes_nothing(advice: bytes) -> None:
    world, membership = RoundWorld("eu"), Leases(0.0)
    with pytest.raises(ValueError):
        membership.hear("eu", advice, 1.0)
    assert not _is_live(membership, world, "eu", 1.0)


def test_the_next_change_is_the_views_age_and_then_each_lease() -> None:
    world, membership = RoundWorld("eu"), Leases(0.0)
    assert membership.next_change_s(world.state, 1.0) == TERM_S
    membership.renew("eu", _session(world, "eu"), 5.0)
    assert membership.next_change_s(world.state, TERM_S) == 5.0 + TERM_S
    assert membership.next_change_s(world.state, 6.0 + TERM_S) is None
