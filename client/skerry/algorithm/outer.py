"""The outer step: what a merge does to the global weights.

A merge stands for T rounds: T = rho L / H, with rho its participation and L its length in inner steps (`rounds`).
T is 1 where every learner brings H steps, and 1/4 where one of four equal learners is a round's only contributor. With
d the merged delta of H steps, t = min(T, 1), and a the share of the run's planned tokens that is behind the fragment,

    mu    = min(mu_max, n / (n + 3)) min(1, max(0, 1 - a) / E),   n = 1 + S' / 24              (1)  momentum
    buf   <- mu^t buf + (1 - mu^t) / (1 - mu) d                                                (2)  its buffer
    Theta <- Theta - lr ((T + t l mu) d + t mu (1 - l (1 - mu)) buf)                           (3)  the step
    l     = min(1, 1.5 - t) for leading-nesterov, 0 for nesterov                               (4)  the lead
    lr    = lr_max g,   g = 0.6875 for RDA of two deltas and more, else 1                      (5)  its rate

S' counts the inner steps since the fragment's momentum began: at the run's start, or its last roll-back. The last
factor of (1) is 1 where no length is planned. Else it falls over the last eight rounds before the planned end, or over
the last eighth of a shorter run: E = min(1/8, 8 a H / S). S is the inner steps that are behind the fragment, so that
a H / S is the share that a round has had so far; nobody has to know how many steps the run will take.

With l = 0, (2) and (3) at T = 1 are SGD with Nesterov momentum. Momentum runs in rounds and not in merges, so learners
that are merged one by one build up the momentum of one joint round together. A merge of more than one round (after an
outage) moves d by T, and momentum by one round.

g makes RDA go about as far as the mean: the mean direction of a round's deltas is about 0.6875 long, and RDA makes up
for that. A single delta is its own direction. A constant schedule has g = 1.

(2) and (3) are an instance of

    buf   <- decay buf + gain d
    Theta <- Theta - rate (d + momentum buf)

and these four scalars are all that the log keeps of the outer optimizer.

Source: Decoupled DiLoCo (arXiv 2604.21428), outer SGD with Nesterov momentum. Warm-up, settling, the lead and momentum
in fractions of rounds are this project's; docs/decisions/0006-outer-step.md has what they are worth.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from skerry.wire.policy import MergeRule, OuterName, OuterOptimizer, OuterSchedule

# The momentum's number n at which it has come to a half, and the inner steps from one number to the next.
_HALF_WAY: Final = 3.0
_STEPS_PER_NUMBER: Final = 24.0
# Momentum falls to 0 over so many rounds before the planned end, or over this share of a run that is shorter.
_SETTLING_ROUNDS: Final = 8.0
_SETTLING_SHARE: Final = 0.125
# Length of the mean direction of a round's deltas, measured in the middle of runs of four learners: 0.85 at first, 0.69
# after 250 steps, 0.62 at 600.
_RDA_SHARE: Final = 0.6875


class OuterStep(NamedTuple):
    """The scalars of one merge, as a commit names them."""

    rate: float
    momentum: float
    decay: float
    gain: float


def settling_share(share: float, run_steps: float, inner_step_count: int) -> float:
    """Returns E: the share of the planned tokens over which momentum falls to 0; `share`, a, is above 0."""
    rounds = run_steps / inner_step_count
    return min(_SETTLING_SHARE, _SETTLING_ROUNDS * share / rounds) if rounds > 0 else _SETTLING_SHARE


def momentum_at(
    outer: OuterOptimizer, *, momentum_steps: float, run_steps: float, share: float, inner_step_count: int
) -> float:
    """Returns mu of equation (1); a constant schedule returns its momentum as it is.

    Args:
        outer: the policy's optimizer.
        momentum_steps: S', inner steps behind the fragment since its momentum began.
        run_steps: S, inner steps behind the fragment since the run began.
        share: a, of the planned tokens; 0 where no length is planned, above 1 in a run that goes on beyond its plan.
        inner_step_count: H.
    """
    if outer.schedule is OuterSchedule.CONSTANT:
        return outer.momentum
    number = 1 + momentum_steps / _STEPS_PER_NUMBER
    momentum = min(outer.momentum, number / (number + _HALF_WAY))
    if share == 0:
        return momentum
    return momentum * min(1.0, max(0.0, 1 - share) / settling_share(share, run_steps, inner_step_count))


def learning_rate_at(outer: OuterOptimizer, rule: MergeRule, *, delta_count: int) -> float:
    """Returns lr of equation (5) for a round of so many deltas; a constant schedule returns its rate as it is."""
    is_longer = rule is not MergeRule.MEAN and delta_count > 1 and outer.schedule is not OuterSchedule.CONSTANT
    return outer.learning_rate * (_RDA_SHARE if is_longer else 1.0)


def outer_step(name: OuterName, learning_rate: float, momentum: float, *, round_count: float) -> OuterStep:
    """Returns equations (2) to (4) as scalars, for a merge of T = `round_count` rounds, above 0."""
    carried_count = min(round_count, 1.0)
    decay = momentum**carried_count
    gain = (1 - decay) / (1 - momentum)
    lead = min(1.0, 1.5 - carried_count) if name is OuterName.LEADING_NESTEROV else 0.0
    fresh = 1 + lead * momentum * carried_count / round_count
    carried = momentum * (1 - lead * (1 - momentum)) * carried_count / round_count
    return OuterStep(learning_rate * round_count * fresh, carried / fresh, decay, gain)
