"""`skerry learn` as a person meets it: real processes, real signals, and what it says to bad input."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from skerry import RunsClient
from skerry_learner.command import learn
from tests.support.made_keys import make_keys, tls_of
from tests.support.serve_process import ServeProcess, serve_process
from tests.support.small_disk import fill, small_disk

_SMALL = ("--model", "nano", "--batch", "2", "--data", argparse.__file__, "--eval-windows", "4")
_STEP_TOKENS = 2 * 64
_ALONE = (*_SMALL, "--alone")
_LONG = ("--steps", "1000000")


def output_of(*words: str | Path) -> str:
    """Returns what `skerry learn` prints, which must succeed. It blocks the event loop, on which nothing waits."""
    result = CliRunner().invoke(learn, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.output


def address(server: ServeProcess) -> str:
    return f"127.0.0.1:{server.port}"


class Process:
    """`skerry learn` in a process of its own, with all that it prints in one stream."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def says(self, text: str) -> None:
        """Returns when it has printed a line with this text."""
        assert self._process.stdout is not None
        while text.encode() not in (line := await self._process.stdout.readline()):
            assert line, f"it ended and has not said {text!r}"

    async def ended(self, number: signal.Signals | None = None) -> tuple[int | None, str]:
        """Returns the exit status and the rest of what it printed, after a signal if one is given."""
        if number is not None:
            self._process.send_signal(number)
        async with asyncio.timeout(60):
            rest, _ = await self._process.communicate()
        return self._process.returncode, rest.decode()


@asynccontextmanager
async def learning(*words: str | Path, before: str = "pass") -> AsyncIterator[Process]:
    """Yields a process of `skerry learn` that has run the code `before`."""
    code = f"{before}; from skerry.cli.main import main; main()"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, "learn", *words,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        yield Process(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def steps_in(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("options", "stated", "planned"),
    [
        (("--shard", "2/3"), {}, 3 * 40 * _STEP_TOKENS),
        (("--shard", "2/3"), {"planned_token_count": 0, "inner_step_count": 2}, 0),
        (("--shard", "2/3", "--planned-tokens", "1000"), {}, 1000),
        ((), {}, 0),  # nobody knows how many learners there will be
    ],
)
async def test_the_run_that_it_creates_is_planned_for_as_many_learners_as_shards_unless_the_plan_is_stated(
    tmp_path: Path, options: tuple[str, ...], stated: dict[str, int], planned: int
) -> None:
    (tmp_path / "policy.json").write_text(json.dumps(stated))
    async with serve_process("memory://", tmp_path) as server:
        words = (*_SMALL, "fit", "--steps", "3", "--horizon", "40", *options)
        files = ("--policy", tmp_path / "policy.json", "--work-dir", tmp_path / "work")
        output_of(*words, "--target", address(server), *files)
        with RunsClient(address(server)) as client:
            policy = client.get_policy("fit")
    assert policy.planned_token_count == planned
    assert policy.inner_step_count == stated.get("inner_step_count", 24)


@pytest.mark.long
async def test_a_learner_that_lost_its_place_to_another_process_exits_with_what_to_do(tmp_path: Path) -> None:
    async with serve_process("memory://", tmp_path) as server:
        words = (*_SMALL, "fit", "--learner-id", "us", "--target", address(server))
        async with learning(*words, *_LONG, "--work-dir", tmp_path / "first") as first:
            await first.says("step=50")
            output_of(*words, "--steps", "3", "--work-dir", tmp_path / "second")
            await first.says("exchange stopped")
            status, rest = await first.ended(signal.SIGTERM)
    assert status == 3
    assert "[SESSION_FENCED]\nnext: give each learner a --learner-id of its own" in rest


@pytest.mark.long
async def test_a_run_that_a_full_store_can_not_take_is_refused_at_once(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        async with serve_process(f"file://{disk}/store", tmp_path) as server:
            fill(disk)
            # 8 MB of weights: more than what the store's reserve frees for the entries of the log.
            words = (*_SMALL, "fit", "--vocabulary", "65536", "--learner-id", "us", "--target", address(server))
            async with learning(*words, "--work-dir", tmp_path / "work") as learner:
                status, rest = await learner.ended()
    assert status == 4
    assert rest.splitlines()[-2].startswith("error: the store is full")
    assert "Task was destroyed" not in rest


async def test_a_learner_that_waits_for_its_syncer_ends_at_once_when_it_is_told_to(tmp_path: Path) -> None:
    words = (*_SMALL, "fit", "--learner-id", "us", "--target", "127.0.0.1:1", "--work-dir", tmp_path)
    async with learning(*words) as learner:
        await learner.says("no syncer answers yet")
        assert await learner.ended(signal.SIGTERM) == (143, "stopped before it trained\n")


async def test_a_second_process_counts_on(tmp_path: Path) -> None:
    async with serve_process("memory://", tmp_path) as server:
        for step_count in (6, 13):
            words = (*_SMALL, "fit", "--learner-id", "us", "--work-dir", tmp_path / "w", "--steps", str(step_count))
            output_of(*words, "--target", address(server))
            with RunsClient(address(server)) as client:
                (known,) = client.get_run("fit").learners
            assert known.report is not None
            assert known.report.step_count == step_count


async def test_it_trains_over_mutual_tls(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    make_keys(keys, "--server", "a.example", "--learner", "us")
    server = ServeProcess("memory://", tmp_path)
    pair = ("--tls-cert", f"{keys}/a.example.pem", "--tls-key", f"{keys}/a.example.key")
    try:
        await server.start(*pair, "--tls-client-ca", f"{keys}/ca.pem")
        words = (*_SMALL, "fit", "--steps", "3", "--learner-id", "us", "--work-dir", tmp_path / "w")
        tls = ("--tls-ca", keys / "ca.pem", "--tls-cert", keys / "us.pem", "--tls-key", keys / "us.key")
        output_of(*words, "--target", address(server), *tls)
        with RunsClient(address(server), tls=tls_of(keys, "us")) as client:
            assert client.get_policy("fit").inner_step_count == 24
    finally:
        await server.stop()


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["--data", "nowhere"], "'nowhere' does not exist"),
        (["--shard", "4/3"], "a shard is i/n with i from 1 to n"),
        (["--device", "abacus"], "Pass another --device"),
        (["--vocabulary", "20"], "Raise --vocabulary"),
        (["--batch", "5000"], "Use more --data, fewer shards, or a smaller --batch"),
        (["--model", "huge"], "is not one of"),
        (["--slowdown", "0.5"], "x>=1"),
        (["--work-dir", "/proc/nowhere"], "--work-dir: can't be written to"),
    ],
)
def test_bad_input_is_refused_with_what_to_do_next(tmp_path: Path, arguments: list[str], advice: str) -> None:
    result = CliRunner().invoke(learn, [*_ALONE, "--work-dir", str(tmp_path), *arguments])
    assert result.exit_code != 0
    assert advice in result.output
    assert "Traceback" not in result.output


@pytest.mark.long
async def test_a_disk_that_runs_full_stops_no_training_and_tears_no_line(tmp_path: Path) -> None:
    words = (*_ALONE, "--steps", "150", "--checkpoint-every", "50", "--work-dir", tmp_path)
    small_files = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))"
    async with learning(*words, before=small_files) as learner:
        status, printed = await learner.ended()
    assert status == 1
    assert "checkpoint can't be written, training goes on" in printed
    assert "metrics can't be written, training goes on" in printed
    assert "trained to the end, but the checkpoint can't be written" in printed
    assert "step=150" in printed
    steps = steps_in(tmp_path)
    assert steps == sorted(set(steps))  # where one line no longer fits, a shorter one may
    assert 0 < len(steps) < 150
    assert files_in(tmp_path) == {"metrics.jsonl"}


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
async def test_a_signal_lets_the_step_finish_and_a_second_start_goes_on(tmp_path: Path, number: signal.Signals) -> None:
    async with learning(*_ALONE, *_LONG, "--log-every", "1", "--work-dir", tmp_path) as learner:
        await learner.says("step=3")
        status, printed = await learner.ended(number)
    done = steps_in(tmp_path)[-1]
    assert status == 128 + number, printed
    assert f"alone: {done} steps, {128 * done} tokens. {tmp_path / 'metrics.jsonl'}" in printed
    assert f"alone: {done + 1} steps" in output_of(*_ALONE, "--steps", str(done + 1), "--work-dir", tmp_path)
