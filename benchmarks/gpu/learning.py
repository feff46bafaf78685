"""What four learners learn on one GPU: held-out loss beside one learner, and one learner with all their batches.

Each is `skerry learn` on the source text of Python's standard library, for the same number of steps; one of the four
is killed in the middle and started again, which resumes from its checkpoint. The merged loss is that of the weights
that the four hold at the end.
"""

from __future__ import annotations

import contextlib
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import torch

from benchmarks.report import Row, measured
from benchmarks.speed.measuring import Size
from benchmarks.speed.processes import environment, served

_LEARNERS: Final = 4
_LIMIT_S: Final = 400.0


def rows(size: Size, device: torch.device) -> Iterator[Row]:
    """A GPT of 4.8 million parameters, context 256, and batches of 32."""
    model, steps, batch = ("nano", 120, 4) if size.is_quick else ("mini", 1500, 32)
    common = f"--model {model} --steps {steps} --device {device.type} --log-every 0 --eval-every {steps // 5}".split()
    with tempfile.TemporaryDirectory(prefix="skerry-benchmark-") as name, served(Path(name)) as syncer:
        folder = Path(name)

        def start(learner: str, *options: str) -> subprocess.Popen[bytes]:
            command = [sys.executable, "-m", "skerry.cli.main", "learn", "--learner-id", learner, *common, *options]
            with (folder / f"{learner}.log").open("ab") as log:
                return subprocess.Popen(
                    [*command, "--work-dir", str(folder / learner)], stdout=log, stderr=log, cwd=folder,
                    env=environment(),
                )  # fmt: skip

        with contextlib.ExitStack() as stack:
            started_s = time.monotonic()
            baselines = {
                "alone": start("alone", "--alone", "--batch", str(batch)),
                "all-batches": start("all-batches", "--alone", "--batch", str(batch * _LEARNERS)),
            }
            for process in baselines.values():
                stack.callback(process.kill)
            _wait(baselines, folder, started_s)
            shared = ("--target", syncer.target, "--batch", str(batch))
            options = [(f"learner-{n}", *shared, "--shard", f"{n}/{_LEARNERS}") for n in range(1, _LEARNERS + 1)]
            started_s = time.monotonic()
            learners = {one[0]: start(*one) for one in options}
            for process in learners.values():
                stack.callback(process.kill)
            _wait_for_step(folder / "learner-2", steps // 3, learners["learner-2"], started_s)
            learners["learner-2"].send_signal(signal.SIGKILL)
            learners["learner-2"].wait()
            learners["learner-2"] = start(*options[1])
            stack.callback(learners["learner-2"].kill)
            _wait(learners, folder, started_s)
            together_s = time.monotonic() - started_s
        losses = {name: _losses(folder / name) for name in (*baselines, *learners)}
    alone, everything = losses["alone"][-1], losses["all-batches"][-1]
    merged = [losses[name][-1] for name in learners]
    case = f"{model}, {steps} steps of {batch} sequences"
    yield measured(case, "held-out loss, one learner", [alone], "nats")
    yield measured(case, "held-out loss, one learner with all batches", [everything], "nats")
    yield measured(case, "held-out loss, four learners, one killed / all batches", merged, "nats", limit=everything)
    if alone != everything:
        share = (alone - statistics.median(merged)) / (alone - everything)
        yield measured(case, "share of the gap that four learners close", [share], "")
    yield measured(case, "time of the four", [together_s], "s")


def _wait(processes: dict[str, subprocess.Popen[bytes]], folder: Path, started_s: float) -> None:
    for name, process in processes.items():
        if process.wait(max(1.0, _LIMIT_S + started_s - time.monotonic())):
            raise RuntimeError(f"learner failed. learner={name}, log={(folder / f'{name}.log').read_text()[-3000:]}")


def _wait_for_step(work: Path, step: int, process: subprocess.Popen[bytes], started_s: float) -> None:
    while time.monotonic() - started_s < _LIMIT_S and process.poll() is None:
        lines = _lines(work)
        if lines and lines[-1]["step"] >= step:
            return
        time.sleep(0.2)
    raise RuntimeError(f"learner did not reach its step. step={step}")


def _lines(work: Path) -> Sequence[dict[str, float]]:
    path = work / "metrics.jsonl"
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return [json.loads(line) for line in whole.splitlines()]


def _losses(work: Path) -> list[float]:
    return [line["val_loss"] for line in _lines(work) if line["val_loss"] is not None]
