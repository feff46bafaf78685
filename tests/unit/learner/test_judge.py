"""`skerry judge`: what it reports of runs of the reference model, and what it says where it can't."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import numpy as np
from click.testing import CliRunner, Result

from skerry import RunsClient
from skerry_learner.command import learn
from skerry_learner.judge import judge
from tests.support.syncer_thread import syncer

_SMALL = ("--batch", "2", "--data", argparse.__file__, "--eval-windows", "4")
_MODEL = ("--model", "nano", "--vocabulary", "300")


def judged(target: str, *words: str) -> Result:
    return CliRunner().invoke(judge, ["demo", "--target", target, *_SMALL, *words])


def test_a_closed_run_is_judged_once_and_its_learners_agree(tmp_path: Path) -> None:
    with syncer() as target, RunsClient(target) as client:
        words = ("--steps", "30", "--inner-steps", "5", "--eval-every", "1", "--work-dir", str(tmp_path))
        assert CliRunner().invoke(learn, ["demo", "--target", target, *_MODEL, *_SMALL, *words]).exit_code == 0
        client.close_run("demo")
        result = judged(target, "--name", "eval")
        assert result.exit_code == 0, result.output
        (report,) = client.get_run("demo").reports
        loss = report.metrics["held_out_loss"]
        assert re.fullmatch(rf"position {report.position}: held_out_loss {loss:.4f}\n", result.output)
        assert report.judge == "eval"
        assert report.run_step_count > 0
        assert 1 < loss < 5.7, "nats a byte, below those of bytes that are all as likely"


def test_a_run_of_another_model_is_refused() -> None:
    with syncer() as target, RunsClient(target) as client:
        client.create_run("demo", {"weight": np.ones(4, np.float32)})
        result = judged(target)
        assert (result.exit_code, "not one of the reference model" in result.output) == (1, True)
        assert not client.get_run("demo").reports
