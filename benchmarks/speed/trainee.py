"""A learner with a torch model in a process of its own, as the trainer table drives it.

Commands come as lines of JSON. "rest" takes steps that sleep, with the exchange on, and tells each `step()`'s time.
"work" takes steps of a fixed amount of arithmetic on this thread, with the exchange on or off, and tells how fast.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any, Final

import torch

from benchmarks.dialogue import Dialogue
from benchmarks.processes import forget_peak, status_bytes
from benchmarks.speed.measuring import SEED
from benchmarks.speed.models import shapes_of
from skerry import Learner, Policy
from skerry.runtime.logs import log_to_stderr

_SIDE: Final = 512  # of the matrices whose product is the work of a step
_STEP_SIZE: Final = 1e-4


class Trainee:
    """One learner, its model and its made-up training."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(SEED)
        self._step_s: float = arguments.step_s
        self._tensors = {name: 0.02 * torch.randn(shape) for name, shape in shapes_of(arguments.numel).items()}
        self._matrix = torch.randn(_SIDE, _SIDE)
        self._product_count = self._calibrated()
        before_bytes = status_bytes(os.getpid(), "VmRSS")
        forget_peak(os.getpid())
        self._learner = Learner(
            self._tensors,
            target=arguments.target,
            run="speed",
            learner_id="trainee",
            create=True,
            policy=Policy(inner_step_count=arguments.fragments, lease_term_s=60.0),
            fragment_count=arguments.fragments,
            connect_timeout_s=120.0,
        )
        self._before_bytes = before_bytes
        self.joined_bytes = status_bytes(os.getpid(), "VmHWM") - before_bytes
        forget_peak(os.getpid())

    def _calibrated(self) -> int:
        """Returns the products that take about one step of this thread's CPU time."""
        self._multiply(8)
        start_s = time.thread_time()
        self._multiply(32)
        return max(1, round(32 * self._step_s / (time.thread_time() - start_s)))

    def _multiply(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self._matrix, self._matrix)

    def _train(self, number: int) -> None:
        """Changes the weights of one block, which is enough for deltas that are not empty."""
        for tensor in list(self._tensors.values())[number % 8 :: 8]:
            tensor.add_(torch.randn(tensor.shape[-1]), alpha=_STEP_SIZE)

    def rest(self, count: int) -> dict[str, Any]:
        """Takes steps that sleep; returns the seconds inside each `step()`."""
        stalls_s = []
        for number in range(count):
            start_s = time.perf_counter()
            self._train(number)
            time.sleep(max(0.0, start_s + self._step_s - time.perf_counter()))
            before_s = time.perf_counter()
            self._learner.step(tokens=1)
            stalls_s.append(time.perf_counter() - before_s)
        stats = self._learner.stats
        return {"stalls_s": stalls_s, "versions": sum(stats.versions.values()), **self._memory()}

    def work(self, count: int, *, is_on: bool) -> dict[str, Any]:
        """Takes steps of arithmetic; returns the seconds of wall clock and of this thread's CPU that they took."""
        start_s, cpu_s = time.perf_counter(), time.thread_time()
        for number in range(count):
            self._multiply(self._product_count)
            self._train(number)
            if is_on:
                self._learner.step(tokens=1)
        return {
            "wall_s": time.perf_counter() - start_s,
            "cpu_s": time.thread_time() - cpu_s,
            "merged": self._learner.stats.deltas_merged,
        }

    def _memory(self) -> dict[str, int]:
        return {"peak_bytes": status_bytes(os.getpid(), "VmHWM") - self._before_bytes}


def main() -> None:
    """Does as it is told."""
    log_to_stderr()
    dialogue = Dialogue()
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--numel", type=int, required=True)
    parser.add_argument("--fragments", type=int, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    trainee = Trainee(parser.parse_args())
    dialogue.answer(joined_bytes=trainee.joined_bytes)
    for command in dialogue.commands():
        match command["do"]:
            case "rest":
                dialogue.answer(**trainee.rest(command["count"]))
            case "work":
                dialogue.answer(**trainee.work(command["count"], is_on=command["is_on"]))


if __name__ == "__main__":
    main()
