"""The made-up course of the demo as fixtures."""

from __future__ import annotations

from pathlib import Path

import pytest

from skerry_demo.history import History
from skerry_demo.judgement import JudgedPosition
from skerry_demo.plan import DemoPlan
from skerry_demo.scenario import DemoEvent, Timeline
from skerry_demo.summary import Evidence
from tests.unit.demo.made_up_course import ENTRIES, START_S, written_history, written_metrics


@pytest.fixture
def history() -> History:
    return written_history(*ENTRIES)


@pytest.fixture
def evidence(tmp_path: Path, history: History) -> Evidence:
    timeline = Timeline(
        {
            "started": DemoEvent(START_S, "three learners train"),
            "learner_killed": DemoEvent(START_S + 2, "SIGKILL for eu-west <at> its step 20"),
            "learner_back": DemoEvent(START_S + 3, "eu-west is back"),
            "syncer_killed": DemoEvent(START_S + 4, "SIGKILL for the syncer"),
            "syncer_back": DemoEvent(START_S + 4.5, "a new syncer serves"),
            "ended": DemoEvent(START_S + 6, "the run is closed"),
            "closed": DemoEvent(START_S + 7, "every delta has its fate"),
        }
    )
    learners = {
        "us-east": written_metrics(tmp_path / "a.jsonl", "us-east", steps=60, acknowledged=[2], stall_ms=3.0),
        "eu-west": written_metrics(tmp_path / "b.jsonl", "eu-west", steps=40, acknowledged=[2, 1], stall_ms=12.5),
        "ap-south": written_metrics(tmp_path / "c.jsonl", "ap-south", steps=20, acknowledged=[1], stall_ms=2.0),
    }
    return Evidence(
        plan=DemoPlan(tmp_path, 60),
        timeline=timeline,
        single=written_metrics(tmp_path / "s.jsonl", "single", steps=60, acknowledged=[0], stall_ms=0.0),
        learners=learners,
        history=history,
        merged=[JudgedPosition(5, START_S + 2.5, 3.5), JudgedPosition(8, START_S + 4, 2.5)],
        initial_loss=5.5,
        single_loss=3.0,
        verify_ok=True,
        parameter_count=1000,
        duration_s=30.0,
        core_count=2,
        load_average=1.5,
    )
