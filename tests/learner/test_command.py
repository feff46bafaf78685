"""`skerry learn` as a person meets it: real processes, real signals, and what it says to bad input."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from skerry.client import RunsClient
from skerry.learner.command import learn
from skerry.learner.metrics import read_metrics
from skerry.wire.policy import Policy
from tests.syncer.serve_process import serve_process

_SMALL = ["--alone", "--model", "nano", "--batch", "2", "--data-limit-mb", "0.3", "--eval-windows", "4"]


def test_training_alone_says_where_its_metrics_are(tmp_path: Path) -> None:
    result = CliRunner().invoke(learn, [*_SMALL, "--steps", "3", "--work-dir", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "learner-1: 3 steps, 384 tokens" in result.output
    assert str(tmp_path / "metrics.jsonl") in result.output


@pytest.mark.parametrize(("stated", "planned"), [({}, 40), ({"planned_step_count": 0, "inner_step_count": 2}, 0)])
async def test_the_run_that_it_creates_is_planned_for_its_schedule_unless_the_policy_says_otherwise(
    tmp_path: Path, stated: dict[str, int], planned: int
) -> None:
    (tmp_path / "policy.json").write_text(json.dumps(stated))
    async with serve_process("memory://", tmp_path) as server:
        arguments = [*_SMALL[1:], "--steps", "3", "--horizon", "40", "--policy", str(tmp_path / "policy.json")]
        arguments += ["--run", "fit", "--target", f"127.0.0.1:{server.port}", "--work-dir", str(tmp_path / "work")]
        result = CliRunner().invoke(learn, arguments)  # blocks the loop, on which nothing waits
        assert result.exit_code == 0, result.output
        policy = _policy_of(f"127.0.0.1:{server.port}")
    assert policy.planned_step_count == planned
    assert policy.inner_step_count == stated.get("inner_step_count", 24)


def _policy_of(target: str) -> Policy:
    with RunsClient(target) as client:
        return client.get_run("fit").run.policy


def test_help_shows_an_example_without_importing_torch() -> None:
    code = (
        "import sys; from skerry.learner.command import learn; "
        "learn(['--help'], standalone_mode=False); assert 'torch' not in sys.modules"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert "skerry learn --run demo --learner-id us-east" in finished.stdout


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["--data", "nowhere"], "no such file or directory: nowhere"),
        (["--shard", "4/3"], "a shard is i/n"),
        (["--device", "abacus"], "pass another --device"),
        (["--vocabulary", "20"], "raise --vocabulary"),
        (["--batch", "5000"], "use more --data, fewer shards, or a smaller --batch"),
        (["--model", "huge"], "is not one of"),
        (["--slowdown", "0.5"], "x>=1"),
    ],
)
def test_bad_input_is_refused_with_what_to_do_next(tmp_path: Path, arguments: list[str], advice: str) -> None:
    result = CliRunner().invoke(learn, [*_SMALL, "--work-dir", str(tmp_path), *arguments])
    assert result.exit_code != 0
    assert advice in result.output
    assert "Traceback" not in result.output


def _allow_small_files_only() -> None:
    limit = 40_000
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def test_a_disk_that_runs_full_stops_no_training_and_tears_no_line(tmp_path: Path) -> None:
    arguments = [*_SMALL, "--steps", "150", "--checkpoint-every", "50", "--work-dir", str(tmp_path)]
    finished = subprocess.run(
        [sys.executable, "-m", "skerry.cli.main", "learn", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=_allow_small_files_only,
    )
    assert finished.returncode == 1
    said = finished.stdout + finished.stderr
    assert "checkpoint can't be written, training goes on" in said
    assert "metrics can't be written, training goes on" in said
    assert "trained to the end, but cannot write the checkpoint" in said
    assert "step=150" in said
    steps = [line.step for line in read_metrics(tmp_path / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_step_finish_and_a_second_start_goes_on(tmp_path: Path, number: signal.Signals) -> None:
    arguments = [*_SMALL, "--steps", "1000000", "--log-every", "1", "--work-dir", str(tmp_path)]
    code = "from skerry.learner.command import learn; learn()"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    with process:
        for text in process.stdout:
            if "step=3" in text:
                break
        process.send_signal(number)
        output = process.stdout.read()
        assert process.wait(60) == 0, output
    done = max(line.step for line in read_metrics(tmp_path / "metrics.jsonl"))
    assert done < 1_000_000
    assert f"learner-1: {done} steps" in output
    result = CliRunner().invoke(learn, [*_SMALL, "--steps", str(done + 1), "--work-dir", str(tmp_path)])
    assert f"learner-1: {done + 1} steps" in result.output
