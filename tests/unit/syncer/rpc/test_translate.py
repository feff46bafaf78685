"""Reports of learners, from their messages and back."""

from __future__ import annotations

import pytest
from google.protobuf.duration_pb2 import Duration

from skerry.v1 import types_pb2 as v1
from skerry_syncer.errors import SyncerError
from skerry_syncer.rounds.membership import LearnerReport, LearnerView, MembershipView
from skerry_syncer.rpc.translate import learner_messages, report_from_message
from skerry_syncer.run.events import learner_message
from skerry_syncer.store.log.state import LearnerState
from tests.unit.syncer.rounds.round_world import RoundWorld


def test_a_report_survives_its_message() -> None:
    report = LearnerReport(
        step_count=9,
        token_count=90,
        step_time_s=0.25,
        loss=1.5,
        adopted=(("body", 3), ("head", 2)),
        stall_time_s=1.5,
        is_flushing=True,
        problem="STORE_FULL",
        is_ending=True,
    )
    message = learner_message(LearnerState("us", "east", "0" * 32), LearnerView(report=report), is_participating=False)
    assert report_from_message(message.report, {"body", "head"}) == report


@pytest.mark.parametrize(
    "message",
    [
        v1.LearnerReport(step_count=-1),
        v1.LearnerReport(step_time=Duration(seconds=2**40)),
        v1.LearnerReport(stall_time=Duration(nanos=-1)),
        v1.LearnerReport(problem="STORE_FULL\x1b[2J"),
        v1.LearnerReport(adopted=[v1.FragmentVersion(fragment="body", version=1)] * 2),
        v1.LearnerReport(adopted=[v1.FragmentVersion(fragment="tail", version=1)]),
    ],
)
def test_a_report_that_makes_no_sense_is_refused(message: v1.LearnerReport) -> None:
    with pytest.raises(SyncerError) as refusal:
        report_from_message(message, {"body", "head"})
    assert refusal.value.reason == "BAD_REQUEST"


def test_of_many_learners_an_answer_has_the_live_ones() -> None:
    names = [f"learner-{number:02}" for number in range(30)]
    report = LearnerReport(adopted=tuple((f"{number:064}", number) for number in range(512)))  # 37 kB
    seen = MembershipView({name: LearnerView(name == "learner-00", report) for name in names}, 0.0)
    shown = [message.learner_id for message in learner_messages(RoundWorld(*names).state, seen)]
    assert shown == ["learner-00", *names[-len(shown) + 1 :]]
    assert 10 < len(shown) < 2**19 / 37_000
