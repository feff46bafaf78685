"""Prints the outer schedule that the defaults give at real lengths: `python -m benchmarks.schedule`.

Arithmetic alone, nothing is trained: what a run of so many inner steps and rounds of H steps does with outer momentum.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Final

from skerry.algorithm.outer import learning_rate_at, momentum_at, outer_step, settling_steps
from skerry.wire.policy import MergeRule, OuterName, OuterOptimizer, OuterSchedule, Policy

_H: Final = (24, 100, 500)
_LENGTHS: Final = (20_000, 100_000)
_ROUNDS: Final = (1, 2, 4, 8, 16)
# Rates of a mean merge with Nesterov momentum of 0.9, constant over the run.
_LITERATURE: Final = (
    ("DiLoCo, arXiv 2311.08105", 0.7),
    ("Scaling Laws for DiLoCo, arXiv 2503.09799, lowest", 0.4),
    ("Scaling Laws for DiLoCo, highest", 0.8),
)


def rows() -> Iterator[str]:
    """Yields the table's lines in Markdown."""
    yield (
        "| settings | H | steps | rounds | rate | momentum in round 1, 2, 4, 8, 16 | all of it from step "
        "| effective step, merged deltas | effective step, mean deltas | settles |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for inner_step_count, length in product(_H, _LENGTHS):
        yield _row_of_the_defaults(inner_step_count, length)
    for name, rate in _LITERATURE:
        outer = OuterOptimizer(OuterName.NESTEROV, rate, 0.9, OuterSchedule.CONSTANT)
        momenta = ", ".join(f"{outer.momentum:.2f}" for _ in _ROUNDS)
        steps = _effective_steps(outer, MergeRule.MEAN)
        yield f"| {name} | any | any | any | {rate:.2f} | {momenta} | 0 | {steps} | no |"


def _row_of_the_defaults(inner_step_count: int, length: int) -> str:
    policy = Policy()
    momenta = [_momentum((number - 1) * inner_step_count, length, inner_step_count) for number in _ROUNDS]
    full = next(
        step
        for step in range(0, length, inner_step_count)
        if _momentum(step, length, inner_step_count) == policy.outer.momentum
    )
    settling = settling_steps(length, inner_step_count)
    return (
        f"| the defaults | {inner_step_count} | {length:,} | {length / inner_step_count:.0f} "
        f"| {_rate(policy.outer, policy.merge):.2f} | {', '.join(f'{momentum:.2f}' for momentum in momenta)} "
        f"| {full} | {_effective_steps(policy.outer, policy.merge)} "
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


def _rate(outer: OuterOptimizer, rule: MergeRule) -> float:
    """Returns the rate of a round of several deltas."""
    return learning_rate_at(outer, rule, delta_count=2)


def _effective_steps(outer: OuterOptimizer, rule: MergeRule) -> str:
    """Returns two cells: the effective step in lengths of the merged delta, and in lengths of the deltas' mean.

    The first is how far a constant merged delta of length 1 moves the weights a round, once momentum is built up.
    """
    rate = _rate(outer, rule)
    step = outer_step(outer.name, rate, outer.momentum, round_count=1.0)
    effective = step.rate * (1 + step.momentum * step.gain / (1 - step.decay))
    return f"{effective:.2f} | {effective * outer.learning_rate / rate:.1f}"


if __name__ == "__main__":
    print("\n".join(rows()))
