"""`python -m benchmarks.quality.broken`: what one broken learner of three costs, as a table.

Each row is a run with such a learner against the two sound ones alone, on the same data and with the default policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import click
import torch

from benchmarks.quality.arms import Islands, Outcome
from benchmarks.quality.cases import default
from benchmarks.quality.task import InnerTraining
from benchmarks.quality.world import Fault, train_islands
from benchmarks.report import Row, measured, write_rows
from skerry.wire.policy import Policy

BOUND_PERCENT: Final = 5.0
"""The most that a broken learner may cost, unless it is `BELIEVED`."""
BELIEVED: Final = "90 times the tokens"
_STEPS: Final = 96
_INNER_STEPS: Final = 8
_CHECKPOINT_STEP: Final = 8
_FAULT_STEP: Final = 28  # in the middle of a round


def _weights_times(factor: float) -> Callable[[InnerTraining, int], None]:
    def before_step(training: InnerTraining, step: int) -> None:
        if step == _FAULT_STEP:
            with torch.no_grad():
                for parameter in training.model.parameters():
                    parameter.mul_(factor)

    return before_step


def _rate_100_times_too_high(training: InnerTraining, step: int) -> None:
    if step == 0:
        training.scale_rate(100)


@dataclass
class _OldCheckpoint:
    """Puts the weights of an early step back, once."""

    weights: dict[str, torch.Tensor]

    def __call__(self, training: InnerTraining, step: int) -> None:
        if step == _CHECKPOINT_STEP:
            self.weights = {name: value.detach().clone() for name, value in training.model.named_parameters()}
        elif step == _FAULT_STEP:
            with torch.no_grad():
                for name, value in training.model.named_parameters():
                    value.copy_(self.weights[name])


FAULTS: Final[Mapping[str, Callable[[], Fault]]] = {
    "NaN": lambda: Fault(_weights_times(float("nan"))),
    "1000 times the tokens": lambda: Fault(token_factor=1000),
    BELIEVED: lambda: Fault(token_factor=90),
    "100 times the rate": lambda: Fault(_rate_100_times_too_high),
    "weights of flipped sign": lambda: Fault(_weights_times(-1.0)),
    "a checkpoint of long ago": lambda: Fault(_OldCheckpoint({})),
}


def arm(learner_count: int) -> Islands:
    """Returns a run of twelve rounds; each learner's data are a third, however many there are."""
    policy = {"inner_step_count": _INNER_STEPS, "quarantine_ratio": Policy().quarantine_ratio}
    return default(learner_count, _STEPS, policy=policy, shard_count=3)


def percent_over(outcome: Outcome, reference: Outcome) -> float:
    """Returns by how many percent the loss is above the reference's."""
    return 100 * (outcome.losses["python"] / reference.losses["python"] - 1)


@click.command()
@click.option("--seeds", type=click.IntRange(min=1), default=2, show_default=True)
def main(seeds: int) -> None:
    """Break one learner of three, and print what it costs."""
    torch.set_num_threads(1)
    sound = [train_islands(arm(2), seed) for seed in range(seeds)]
    rows: list[Row] = []
    for name, fault in FAULTS.items():
        costs = [percent_over(train_islands(arm(3), seed, fault()), sound[seed]) for seed in range(seeds)]
        rows.append(measured(f"1 of 3: {name}", "over the two sound ones", costs, "%", limit=BOUND_PERCENT))
    write_rows("broken", rows)


if __name__ == "__main__":
    main()
