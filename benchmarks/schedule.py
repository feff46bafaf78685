"""Prints the outer schedule that the defaults give at real lengths: `python -m benchmarks.schedule`.

Arithmetic alone, nothing is trained: what a run of so many inner steps and rounds of H steps does with outer momentum.
docs/learning.md holds its output.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Final

from skerry.algorithm.outer import momentum_at, outer_step, settling_steps
from skerry.wire.policy import Policy

_H: Final = (24, 100, 500)
_LENGTHS: Final = (20_000, 100_000)
_ROUNDS: Final = (1, 2, 4, 8, 16)


def rows() -> Iterator[str]:
    """Yields the table's lines in Markdown."""
    yield "| H | steps | rounds | momentum in round 1, 2, 4, 8, 16 | all of it from step | effective step | settles |"
    yield "|---|---|---|---|---|---|---|"
    for inner_step_count, length in product(_H, _LENGTHS):
        momenta = [_momentum((number - 1) * inner_step_count, length, inner_step_count) for number in _ROUNDS]
        full = next(
            step
            for step in range(0, length, inner_step_count)
            if _momentum(step, length, inner_step_count) == Policy().outer.momentum
        )
        settling = settling_steps(length, inner_step_count)
        yield (
            f"| {inner_step_count} | {length:,} | {length / inner_step_count:.0f} "
            f"| {', '.join(f'{momentum:.2f}' for momentum in momenta)} | {full} | {_effective_step():.1f} "
            f"| last {settling / inner_step_count:.0f} rounds, {100 * settling / length:.1f} % |"
        )


def _momentum(step_count: int, length: int, inner_step_count: int) -> float:
    return momentum_at(
        Policy().outer,
        momentum_steps=step_count,
        run_steps=step_count,
        planned_step_count=length,
        inner_step_count=inner_step_count,
    )


def _effective_step() -> float:
    """Returns how far a constant outer gradient of 1 moves the weights a round, once momentum is built up."""
    outer = Policy().outer
    step = outer_step(outer.name, outer.learning_rate, outer.momentum, round_count=1.0)
    buffer = step.gain / (1 - step.decay)
    return step.rate * (1 + step.momentum * buffer)


if __name__ == "__main__":
    print("\n".join(rows()))
