"""`skerry learn` as a person meets it: real processes, real signals, and what it says to bad input."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from skerry import MergeRule, OuterOptimizer, OuterSchedule, RunsClient, Tls
from skerry.wire import Codec, Encoding
from skerry.wire.policy import Policy
from skerry_learner.command import learn
from skerry_learner.metrics import read_metrics
from tests.support.made_keys import make_keys, tls_of
from tests.support.serve_process import ServeProcess, serve_process
from tests.support.small_disk import fill, small_disk

_SMALL = ["--alone", "--model", "nano", "--batch", "2", "--data-limit-mb", "0.3", "--eval-windows", "4"]


def test_training_alone_says_where_its_metrics_are(tmp_path: Path) -> None:
    result = CliRunner().invoke(learn, [*_SMALL, "--steps", "3", "--work-dir", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "alone: 3 steps, 384 tokens" in result.output
    assert str(tmp_path / "metrics.jsonl") in result.output


@pytest.mark.parametrize(("stated", "planned"), [({}, 40), ({"planned_step_count": 0, "inner_step_count": 2}, 0)])
async def test_the_run_that_it_creates_is_planned_for_its_schedule_unless_the_policy_says_otherwise(
    tmp_path: Path, stated: dict[str, int], planned: int
) -> None:
    (tmp_path / "policy.json").write_text(json.dumps(stated))
    async with serve_process("memory://", tmp_path) as server:
        arguments = [*_SMALL[1:], "--steps", "3", "--horizon", "40", "--policy", str(tmp_path / "policy.json")]
        arguments += ["fit", "--target", f"127.0.0.1:{server.port}", "--work-dir", str(tmp_path / "work")]
        result = CliRunner().invoke(learn, arguments)  # blocks the loop, on which nothing waits
        assert result.exit_code == 0, result.output
        policy = _policy_of(f"127.0.0.1:{server.port}")
    assert policy.planned_step_count == planned
    assert policy.inner_step_count == stated.get("inner_step_count", 24)


async def test_a_learner_that_lost_its_place_to_another_process_exits_with_what_to_do(tmp_path: Path) -> None:
    async with serve_process("memory://", tmp_path) as server:
        arguments = [*_SMALL[1:], "fit", "--learner-id", "us", "--target", f"127.0.0.1:{server.port}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        first = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "skerry.cli.main", "learn", *arguments),
            *("--steps", "1000000", "--log-every", "50", "--work-dir", str(tmp_path / "first")),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        assert first.stdout is not None
        while b"step=50" not in await first.stdout.readline():
            pass
        second = ["--steps", "3", "--work-dir", str(tmp_path / "second")]
        result = CliRunner().invoke(learn, [*arguments, *second])  # blocks the loop; the first goes on
        assert result.exit_code == 0, result.output
        while b"exchange stopped" not in await first.stdout.readline():
            pass
        first.terminate()
        rest, _ = await first.communicate()
        assert first.returncode == 3
        assert b"[SESSION_FENCED]\nnext: give each learner a --learner-id of its own" in rest


async def test_last_work_that_a_full_store_does_not_take_is_a_failure(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        async with serve_process(f"file://{disk}/store", tmp_path) as server:
            arguments = [*_SMALL[1:], "fit", "--target", f"127.0.0.1:{server.port}", "--inner-steps", "4"]
            arguments += ["--steps", "1000000", "--log-every", "5", "--flush-timeout", "1"]
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "skerry.cli.main", "learn", *arguments),
                *("--work-dir", str(tmp_path / "work")),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            )
            assert process.stdout is not None
            while b"step=20" not in await process.stdout.readline():
                pass
            fill(disk)
            while b"reason=STORE_FULL" not in await process.stdout.readline():
                pass
            process.terminate()
            rest, _ = await process.communicate()
    assert b"error: trained to the end, but the syncer did not take the last work within 1 s. steps=" in rest
    assert process.returncode == 1


async def test_a_run_that_a_full_store_can_not_take_is_refused_at_once(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        async with serve_process(f"file://{disk}/store", tmp_path) as server:
            fill(disk)
            arguments = [*_SMALL[1:], "fit", "--learner-id", "us", "--target", f"127.0.0.1:{server.port}"]
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "skerry.cli.main", "learn", *arguments, "--work-dir", str(tmp_path / "work")),
                stderr=subprocess.PIPE,
            )
            assert process.stderr is not None
            while b"learner ready" not in await process.stderr.readline():
                pass
            async with asyncio.timeout(20):
                rest = await process.stderr.read()
                assert await process.wait() == 4
    assert rest.splitlines()[-2].startswith(b"error: the store is full")
    assert b"Task was destroyed" not in rest


async def test_a_learner_that_waits_for_its_syncer_ends_at_once_when_it_is_told_to(tmp_path: Path) -> None:
    arguments = [*_SMALL[1:], "fit", "--learner-id", "us", "--target", "127.0.0.1:1", "--work-dir", str(tmp_path)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "skerry.cli.main", "learn", *arguments), stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    while b"no syncer answers yet" not in await process.stderr.readline():
        pass
    process.terminate()
    async with asyncio.timeout(10):
        assert await process.stderr.read() == b"stopped before it trained\n"
        assert await process.wait() == 0


async def test_after_a_resume_observers_see_the_learner_s_own_step(tmp_path: Path) -> None:
    async with serve_process("memory://", tmp_path) as server:
        target = f"127.0.0.1:{server.port}"
        arguments = [*_SMALL[1:], "fit", "--learner-id", "us", "--target", target, "--inner-steps", "2"]
        for step_count in (3, 8):
            taken = ["--steps", str(step_count), "--work-dir", str(tmp_path / "w")]
            result = CliRunner().invoke(learn, [*arguments, *taken])  # blocks the loop, on which nothing waits
            assert result.exit_code == 0, result.output
            with RunsClient(target) as client:
                (known,) = client.get_run("fit").learners
            assert known.report is not None
            assert known.report.step_count == step_count


def _exact_policy(folder: Path) -> list[str]:
    """The option for a policy with which a learner that is alone brings all of its steps into the run."""
    exact = replace(Policy(lease_term_s=1.0), inner_step_count=4, merge=MergeRule.MEAN, quarantine_ratio=0)
    exact = replace(
        exact,
        outer=OuterOptimizer(learning_rate=1.0, momentum=0.0, schedule=OuterSchedule.CONSTANT),
        delta_encoding=Encoding(Codec.FLOAT32),
        update_encoding=Encoding(Codec.FLOAT32),
    )
    (folder / "policy.json").write_text(json.dumps(exact.to_json()))
    return ["--policy", str(folder / "policy.json")]


def _assert_run_has(target: str, checkpoint: dict[str, Any]) -> None:
    """Closes the run, and checks that it has the steps of a checkpoint, each once."""
    with RunsClient(target) as client:
        run = client.close_run("fit")
        for name, merged in client.pull(run):
            np.testing.assert_allclose(merged, checkpoint["model"][name], rtol=0, atol=1e-5, err_msg=name)


async def test_a_learner_that_ended_goes_on_without_a_word(tmp_path: Path) -> None:
    async with serve_process("memory://", tmp_path) as server:
        target = f"127.0.0.1:{server.port}"
        arguments = [*_SMALL[1:], "fit", "--learner-id", "us", "--target", target, *_exact_policy(tmp_path)]
        for step_count in (6, 13):
            taken = ["--steps", str(step_count), "--work-dir", str(tmp_path / "w")]
            result = CliRunner().invoke(learn, [*arguments, *taken])  # blocks the loop, on which nothing waits
            assert result.exit_code == 0, result.output
            assert "dropped" not in result.output
        _assert_run_has(target, torch.load(tmp_path / "w" / "checkpoint.pt", weights_only=True))


async def test_it_trains_over_mutual_tls(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    make_keys(keys, "--server", "a.example", "--learner", "us")
    server = ServeProcess("memory://", tmp_path)
    pair = ["--tls-cert", f"{keys}/a.example.pem", "--tls-key", f"{keys}/a.example.key"]
    try:
        await server.start(*pair, "--tls-client-ca", f"{keys}/ca.pem")
        arguments = [
            *_SMALL[1:],
            "--steps",
            "3",
            "fit",
            "--learner-id",
            "us",
            "--work-dir",
            str(tmp_path / "w"),
        ]
        arguments += ["--target", f"127.0.0.1:{server.port}", "--tls-ca", f"{keys}/ca.pem"]
        arguments += ["--tls-cert", f"{keys}/us.pem", "--tls-key", f"{keys}/us.key"]
        result = CliRunner().invoke(learn, arguments)  # blocks the loop, on which nothing waits
        assert result.exit_code == 0, result.output
        assert _policy_of(f"127.0.0.1:{server.port}", tls_of(keys, "us")).planned_step_count == 3
    finally:
        await server.stop()


def _policy_of(target: str, tls: Tls | None = None) -> Policy:
    with RunsClient(target, tls=tls) as client:
        return client.get_policy("fit")


def test_help_shows_an_example_without_importing_torch() -> None:
    code = (
        "import sys; from skerry_learner.command import learn; "
        "learn(['--help'], standalone_mode=False); assert 'torch' not in sys.modules"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert "skerry learn demo --learner-id us-east" in finished.stdout


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["--data", "nowhere"], "'nowhere' does not exist"),
        (["--shard", "4/3"], "a shard is i/n"),
        (["--device", "abacus"], "pass another --device"),
        (["--vocabulary", "20"], "raise --vocabulary"),
        (["--batch", "5000"], "use more --data, fewer shards, or a smaller --batch"),
        (["--model", "huge"], "is not one of"),
        (["--slowdown", "0.5"], "x>=1"),
        (["--work-dir", "/proc/nowhere"], "--work-dir: can't be written to"),
    ],
)
def test_bad_input_is_refused_with_what_to_do_next(tmp_path: Path, arguments: list[str], advice: str) -> None:
    result = CliRunner().invoke(learn, [*_SMALL, "--work-dir", str(tmp_path), *arguments])
    assert result.exit_code != 0
    assert advice in result.output
    assert "Traceback" not in result.output


def test_a_disk_that_runs_full_stops_no_training_and_tears_no_line(tmp_path: Path) -> None:
    arguments = [*_SMALL, "--steps", "150", "--checkpoint-every", "50", "--work-dir", str(tmp_path)]
    # Not by `preexec_fn`: in a fork of this process, gRPC's threads may meet closed files before the program begins.
    small_files = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))"
    finished = subprocess.run(
        [sys.executable, "-c", f"{small_files}; from skerry_learner.command import learn; learn()", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
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
    code = "from skerry_learner.command import learn; learn()"
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
    assert f"alone: {done} steps" in output
    result = CliRunner().invoke(learn, [*_SMALL, "--steps", str(done + 1), "--work-dir", str(tmp_path)])
    assert f"alone: {done + 1} steps" in result.output
