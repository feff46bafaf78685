"""Many simulated trainers in one process: each a real client with its own sockets and threads, training is made up.

Commands come as lines of JSON. "train" takes steps of all of them for a while, and tells how they fare.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np

from benchmarks.dialogue import Dialogue
from benchmarks.speed.measuring import SEED
from benchmarks.speed.models import arrays_of
from skerry import ArrayLearner
from skerry.runtime.logs import log_to_stderr


class Crew:
    """Learners `first` to `first + count` of the fleet."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._noise = np.random.default_rng(SEED + arguments.first)
        self._step_s: float = arguments.step_s
        self._arrays = [arrays_of(arguments.numel) for _ in range(arguments.count)]
        self._learners = [
            ArrayLearner(
                arrays,
                target=arguments.target,
                run="speed",
                learner_id=f"trainer-{arguments.first + number}",
                connect_timeout_s=60.0,
            )
            for number, arrays in enumerate(self._arrays)
        ]

    def train(self, duration_s: float) -> dict[str, Any]:
        """Takes a step of every learner each `step_s`, and returns their counts."""
        start_s, attached, looks, late_s = time.perf_counter(), 0, 0, 0.0
        due_s = start_s
        while due_s < start_s + duration_s:
            for learner, arrays in zip(self._learners, self._arrays, strict=True):
                array = arrays["embedding.weight"]
                array += self._noise.standard_normal(array.shape[-1], np.float32) * np.float32(1e-3)
                learner.step(tokens=1)
                attached += learner.stats.is_attached
                looks += 1
            due_s += self._step_s
            late_s = max(late_s, time.perf_counter() - due_s)
            time.sleep(max(0.0, due_s - time.perf_counter()))
        stats = [learner.stats for learner in self._learners]
        return {
            "attached_share": attached / looks,
            "late_s": late_s,
            "acknowledged": sum(one.deltas_acknowledged for one in stats),
            "lost": sum(one.deltas_dropped for one in stats),
            "returned": sum(one.deltas_returned for one in stats),
            "waiting_s": statistics.mean(one.waiting_s for one in stats),
            "failures": [str(learner.failure) for learner in self._learners if learner.failure is not None],
        }


def main() -> None:
    """Does as it is told."""
    log_to_stderr()
    dialogue = Dialogue()
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--numel", type=int, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    crew = Crew(parser.parse_args())
    dialogue.answer()
    for command in dialogue.commands():
        dialogue.answer(**crew.train(command["duration_s"]))


if __name__ == "__main__":
    main()
