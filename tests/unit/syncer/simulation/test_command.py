"""`skerry simulate`: what it takes and what it prints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from skerry.cli import failures
from skerry_syncer.simulation.command import simulate

Command = Callable[..., str]
SHORT = ("--duration", "10m", "--fragments", "1")
TWO = ("--learner", "us:count=2", "--learner", "eu:step=1.2,jitter=0.1")


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Returns what runs the command, and returns what it prints if it ends with that status."""

    def run(*words: str, status: int = 0) -> str:
        ended = failures.run(simulate, list(words))
        shown = capsys.readouterr()
        assert ended == status, shown.out + shown.err
        return shown.err if status else shown.out

    return run


def test_a_person_reads_regions_rounds_and_what_an_outage_costs(command: Command) -> None:
    shown = command(*SHORT, *TWO, "--outage", "us@2m+3m")
    for word in ("training", "goodput", "participation", "staleness", "without outages", "cost: ", " of others"):
        assert word in shown
    assert "cost" not in command(*SHORT, *TWO)


def test_a_script_reads_the_same_for_the_same_seed(command: Command) -> None:
    words = (*SHORT, *TWO, "--spot", "us", "--cut", "eu@10m+5m", "--duration", "1h", "--seed", "3", "--json")
    shown = json.loads(command(*words))
    assert shown == json.loads(command(*words))
    assert {(outage["place"], outage["is_cut"]) for outage in shown["outages"]} == {("us", False), ("eu", True)}
    assert shown["cost"]["merged_step_count"] > 0
    assert set(shown["regions"]) == {"us", "eu"}
    assert len(shown["over_time"]) == 120


def test_the_default_is_eight_learners_on_the_chips_of_the_published_case(command: Command) -> None:
    shown = json.loads(command(*SHORT, "--json"))
    assert len(shown["regions"]) == 8
    assert shown["without_outages"] is shown["cost"] is None
    assert 0.8 < shown["summary"]["training"] < 0.98


def test_a_policy_and_what_chips_lose_may_be_set(command: Command) -> None:
    learner = ("--learner", "us:count=2,chips=1000,mtbf=10d,loss=2m")
    often = json.loads(command(*SHORT, *learner, "--set", "inner_step_count=12", "--json"))["summary"]
    assert often["version_count"] > 25
    assert often["training"] < 0.95


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--outage", "us@1h"), "is not PLACE@START+DURATION, such as us@1h+30m"),
        (("--outage", "us@1h+30x"), "is no positive time, such as 90s, 30m, 2h or 1d"),
        (("--outage", "mars@1h+30m"), "no --learner is in mars; known: r1, r2"),
        (("--spot", "mars"), "no --learner is in mars"),
        (("--cut", "syncer@1h+30m"), "no --learner is in syncer"),
        (("--outage", "r1@2h+1m"), "the outage of r1 begins when the simulation is over"),
        (("--learner", "us:speed=1"), "is none of step=…, count=…"),
        (("--learner", "us:step=1", "--learner", "us:step=2"), "give each --learner a region of its own"),
        (("--learner", "syncer:step=1"), "syncer and store are none"),
        (("--set", "quorum=2"), "policy has no such field"),
    ],
)
def test_what_is_wrong_is_said_with_what_to_give(command: Command, words: tuple[str, ...], reason: str) -> None:
    assert reason in command(*words, status=2)


def test_the_picture_is_drawn(command: Command, tmp_path: Path) -> None:
    command(*SHORT, *TWO, "--outage", "us@2m+3m", "--plot", str(tmp_path / "outage.png"))
    assert (tmp_path / "outage.png").read_bytes().startswith(b"\x89PNG")
    assert "can't be drawn" in command(*SHORT, *TWO, "--plot", str(tmp_path / "outage.unknown"), status=2)
