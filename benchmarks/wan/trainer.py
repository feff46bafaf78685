"""A learner of the wide-area cases: real training of a perceptron, on an island or data-parallel.

An accelerator that other processes do not slow down is imitated: a step that is finished early waits until `--step-s`
is over.
"""

from __future__ import annotations

import argparse
import os
import time
from datetime import timedelta
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.dialogue import Dialogue
from skerry import ArrayLearner, Policy

SHAPES: Final = {"in.weight": (512, 4096), "out.weight": (4096, 512)}
NUMEL: Final = sum(rows * columns for rows, columns in SHAPES.values())
BATCH: Final = 8  # samples, which count as tokens
H: Final = 24
_RATE: Final = np.float32(2e-4)  # ten times as much diverges
_TIMEOUT_S: Final = 60.0


Gradients = dict[str, NDArray[np.float32]]


class Perceptron:
    """Learns from a teacher of its own shape."""

    def __init__(self, number: int) -> None:
        first = np.random.default_rng(1)
        self.arrays = {name: self._drawn(first, shape) for name, shape in SHAPES.items()}
        teacher = np.random.default_rng(0)
        self._teacher = {name: self._drawn(teacher, shape) for name, shape in SHAPES.items()}
        self._source = np.random.default_rng(100 + number)

    @staticmethod
    def _drawn(source: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float32]:
        return source.standard_normal(shape, np.float32) / np.float32(shape[0] ** 0.5)

    def gradients(self) -> tuple[Gradients, float]:
        """Returns the gradients of a fresh batch, and its loss."""
        x = self._source.standard_normal((BATCH, SHAPES["in.weight"][0]), np.float32)
        target = np.maximum(x @ self._teacher["in.weight"], 0) @ self._teacher["out.weight"]
        hidden = np.maximum(x @ self.arrays["in.weight"], 0)
        error = hidden @ self.arrays["out.weight"] - target
        back = (error @ self.arrays["out.weight"].T) * (hidden > 0)
        loss = float(np.square(error).mean())
        return {"in.weight": x.T @ back / BATCH, "out.weight": hidden.T @ error / BATCH}, loss

    def descend(self, gradients: Gradients) -> None:
        """Takes a step of gradient descent."""
        for name, gradient in gradients.items():
            self.arrays[name] -= _RATE * gradient


class Island:
    """Trains with Skerry."""

    def __init__(self, arguments: argparse.Namespace, model: Perceptron) -> None:
        self._learner = ArrayLearner(
            model.arrays,
            target=arguments.target,
            run="wan",
            learner_id=f"learner-{arguments.number}",
            create=True,
            policy=Policy(inner_step_count=H, lease_term_s=5.0),
            fragment_count=4,
            connect_timeout_s=_TIMEOUT_S,
            tls="insecure",
        )

    def combined(self, gradients: Gradients) -> Gradients:
        """Returns the gradients: nobody waits for another one at each step."""
        return gradients

    def tell(self, loss: float) -> None:
        """Is called when a step has been taken."""
        self._learner.step(BATCH, loss)

    def counts(self) -> dict[str, int]:
        """Returns how many deltas were merged, and the bytes that were moved."""
        stats = self._learner.stats
        return {"merged": stats.deltas_merged, "bytes_up": stats.bytes_up, "bytes_down": stats.bytes_down}


class DataParallel:
    """Averages the gradients with all others, with gloo."""

    def __init__(self, arguments: argparse.Namespace, _: Perceptron) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "wan0"
        from torch import distributed

        host, _, port = arguments.target.partition(":")
        is_first = arguments.number == 0
        timeout = timedelta(seconds=_TIMEOUT_S)
        self._store = distributed.TCPStore(  # type: ignore[attr-defined]
            "0.0.0.0" if is_first else host, int(port), is_master=is_first, timeout=timeout, wait_for_workers=False
        )
        distributed.init_process_group("gloo", store=self._store, rank=arguments.number, world_size=arguments.learners)
        self._world_size = arguments.learners

    def combined(self, gradients: Gradients) -> Gradients:
        """Returns the average."""
        import torch
        from torch import distributed

        for work in [distributed.all_reduce(torch.from_numpy(one), async_op=True) for one in gradients.values()]:
            work.wait()
        return {name: one / self._world_size for name, one in gradients.items()}

    def tell(self, loss: float) -> None:
        """Is called when a step has been taken."""

    def counts(self) -> dict[str, int]:
        """Returns that nothing is merged."""
        return {"merged": 0}


_HOW: Final[dict[str, type[Island | DataParallel]]] = {"island": Island, "data-parallel": DataParallel}


def train(model: Perceptron, how: Island | DataParallel, step_s: float, seconds: float) -> dict[str, Any]:
    """Trains for a time, and returns when each step ended, what of it was computing, and the mean loss at the end."""
    begin_s = time.monotonic()
    ends_s, computing_s, losses = [], [], []
    while (step_begin_s := time.monotonic()) < begin_s + seconds:
        gradients, loss = model.gradients()
        combining_s = -time.monotonic()
        gradients = how.combined(gradients)
        combining_s += time.monotonic()
        model.descend(gradients)
        time.sleep(max(0.0, step_begin_s + combining_s + step_s - time.monotonic()))
        computing_s.append(time.monotonic() - step_begin_s - combining_s)
        how.tell(loss)
        losses.append(loss)
        ends_s.append(time.monotonic())
    return {
        "begin_s": begin_s,
        "ends_s": ends_s,
        "computing_s": computing_s,
        "loss": sum(losses[-10:]) / len(losses[-10:]),
        **how.counts(),
    }


def main() -> None:
    """Does as it is told."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", choices=_HOW, required=True)
    parser.add_argument("--target", default="")
    parser.add_argument("--number", type=int, default=0)
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--step-s", type=float, default=0.0)
    arguments = parser.parse_args()
    dialogue = Dialogue()
    model = Perceptron(arguments.number)
    how = _HOW[arguments.how](arguments, model)
    dialogue.answer()
    for command in dialogue.commands():
        dialogue.answer(**train(model, how, arguments.step_s, command["seconds"]))
    os._exit(0)


if __name__ == "__main__":
    main()
