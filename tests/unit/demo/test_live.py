"""What a person sees while the demo runs."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from skerry_demo.live import LiveView
from skerry_demo.plan import DemoPlan
from skerry_demo.processes import Nursery
from skerry_demo.scenario import DemoEvent, Scenario
from skerry_demo.summary import Evidence
from tests.unit.demo.made_up_course import START_S


@pytest.fixture
def scenario(evidence: Evidence, tmp_path: Path) -> Scenario:
    scenario = Scenario(DemoPlan(tmp_path, 60), Nursery(tmp_path, {}), show=lambda scenario: None)
    scenario.timeline.events["started"] = DemoEvent(START_S, "three learners train")
    scenario.timeline.events["learner_killed"] = DemoEvent(START_S + 2, "SIGKILL for eu-west at its step 20")
    scenario.learners.update(evidence.learners)
    scenario.killed.add("eu-west")
    return scenario


def _shown(scenario: Scenario, *, is_terminal: bool) -> str:
    output = io.StringIO()
    with LiveView(Console(file=output, force_terminal=is_terminal, width=80)) as view:
        view.refresh(scenario)
        view.refresh(scenario)
    return output.getvalue()


def test_a_terminal_shows_every_learner_within_80_columns(scenario: Scenario) -> None:
    text = _shown(scenario, is_terminal=True)
    for part in ("us-east", "ap-south", "killed", "syncer", "SIGKILL for eu-west at its step 20", "2.0 s", "▁"):
        assert part in text
    assert "…" not in text


def test_a_pipe_gets_a_line_and_no_second_one_at_once(scenario: Scenario) -> None:
    lines = _shown(scenario, is_terminal=False).splitlines()
    assert lines == [
        "three learners train",
        "SIGKILL for eu-west at its step 20",
        "preparing: us-east 60, eu-west killed, ap-south 20",
    ]
