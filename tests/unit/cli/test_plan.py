"""`skerry plan`: what it takes, what it prints, and what it learns of a live run."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skerry import ArrayLearner, Policy, RunsClient
from skerry.cli import failures
from skerry.cli.plan import plan_command

Planner = Callable[..., str]
GIVEN = ("--parameters", "12e9", "--learner", "us:step=1.1,bandwidth=2Gbit,price=98", "--learner", "eu:step=1.2")


@pytest.fixture
def planner(capsys: pytest.CaptureFixture[str]) -> Planner:
    """Returns what runs the command, and returns what it prints if it ends with that status."""

    def run(*words: str, status: int = 0) -> str:
        ended = failures.run(plan_command, list(words))
        shown = capsys.readouterr()
        assert ended == status, shown.out + shown.err
        return shown.err if status else shown.out

    return run


def test_every_choice_of_h_fragments_and_codec_is_planned(planner: Planner) -> None:
    shown = json.loads(planner(*GIVEN, "--h", "24,100,500", "--fragments", "8,24", "--codec", "int4,float32", "--json"))
    choices = [tuple(each["setting"].values()) for each in shown["plans"]]
    assert choices == [(h, p, codec) for h in (24, 100, 500) for p in (8, 24) for codec in ("int4", "float32")]
    names = [reference["name"] for reference in shown["synchronous"]]
    assert names == ["data-parallel", "DiLoCo H=24", "DiLoCo H=100", "DiLoCo H=500"]


def test_a_person_reads_tables_and_why_a_choice_is_refused(planner: Planner) -> None:
    shown = planner(*GIVEN, "--h", "12,500")
    assert "H=12 P=24 int4 is refused. us: 3.15 Gbit/s needed, 2 given" in shown
    assert "H=500 P=24 int4 is refused" not in shown
    for word in ("mean rate", "paper's peak", "data-parallel", "DiLoCo H=500"):
        assert word in shown


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--parameters", "1e9"), "give --learner NAME:step=SECONDS"),
        (("--learner", "us:step=1"), "give either --parameters"),
        (("--parameters", "1e9", "--learner", "us:bandwidth=1Gbit"), "give --learner us:step=SECONDS"),
        (("--parameters", "1e9", "--learner", "us:speed=1"), "is none of step=…, bandwidth=…"),
        (("--parameters", "1e9", "--learner", "us:bandwidth=1Gb"), "is no positive number of bit, such as 2Gbit"),
        (("--parameters", "1e9", "--learner", "us:step=1", "--codec", "int2"), "'int2' is not a valid Codec"),
    ],
)
def test_what_is_missing_or_wrong_is_said_with_what_to_give(
    planner: Planner, words: tuple[str, ...], reason: str
) -> None:
    assert reason in planner(*words, status=2)


def test_the_picture_is_drawn(planner: Planner, tmp_path: Path) -> None:
    planner(*GIVEN, "--h", "24", "--plot", str(tmp_path / "plan.png"))
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert "can't be drawn" in planner(*GIVEN, "--plot", str(tmp_path / "plan.unknown"), status=2)


def test_without_matplotlib_the_picture_names_what_to_install(
    planner: Planner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Missing:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "matplotlib":
                raise ModuleNotFoundError(name=name)

    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    shown = planner(*GIVEN, "--plot", str(tmp_path / "plan.png"), status=failures.ExitStatus.NOT_INSTALLED)
    assert "next: pip install matplotlib" in shown


def test_a_live_run_is_planned_from_what_it_measures(planner: Planner, target: str) -> None:
    weights = np.zeros((64, 64), np.float32)
    source = np.random.default_rng(0)
    policy = Policy(inner_step_count=4)
    with (
        ArrayLearner({"w": weights}, target=target, run="demo", learner_id="us", create=True, policy=policy) as learner,
        RunsClient(target) as client,
    ):

        def has_measured() -> bool:
            (seen,) = client.get_run("demo").learners
            return bool(seen.fates and seen.report.sent_bytes and seen.report.step_time.ToNanoseconds())

        deadline_s = time.monotonic() + 60
        while not has_measured():
            assert time.monotonic() < deadline_s
            weights += source.standard_normal(weights.shape, np.float32)
            learner.step(1)
            time.sleep(0.02)
        shown: dict[str, Any] = json.loads(planner("--from-run", "demo", "--target", target, "--json"))
        (plan,) = shown["plans"]
        (us,) = plan["learners"]
        assert shown["parameters"] == weights.size
        assert plan["setting"] == {"inner_step_count": 4, "fragment_count": 1, "codec": "int4"}
        assert us["name"] == "us"
        assert 2.5 < 4 * us["up_bits_per_step"] / weights.size < 10, "small parts have large headers"
        narrow = planner("--from-run", "demo", "--target", target, "--learner", "us:step=1,bandwidth=1kbit")
        assert "H=4 P=1 int4 is refused. us: " in narrow
    assert "give either" in planner("--from-run", "demo", "--parameters", "1", "--target", target, status=2)
