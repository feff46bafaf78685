"""The outer optimizers: the four scalars of a step, from how far a fragment is and how much of a round takes part.

A merge stands for T rounds: 1 where every learner brings H steps, 1/4 where one of four equal learners is merged alone,
2 after an outage of 2 H steps. With d the outer gradient of H steps, every optimizer here is an instance of

    buf   <- decay buf + gain d
    Theta <- Theta - rate (d + momentum buf)

which is all that the log has to know of it.

    nesterov            momentum runs in rounds, not in merges: over T rounds, of which one at most counts here, the
                        buffer decays by mu^T and takes (1 - mu^T) / (1 - mu) of d; rate = lr T. With T = 1 this is SGD
                        with Nesterov momentum. Four learners that are merged one by one build up the momentum of one
                        round together. After an outage of ten rounds d goes ten rounds far, momentum no further than
                        after one: the way was really gone, and is no ten gradients.
    leading-nesterov    the same momentum, and weights that stand a part l of a round ahead: Theta - F is published with
                        F = l lr mu^2 buf, what momentum will add; that weighs d by T + t l mu and buf by
                        t mu (1 - l (1 - mu)), t = min(T, 1), where l and mu stay the same. l = 1.5 - t, from 0.5 to 1:
                        learners work on the weights of a joint round for a round, and half of one is the mean; one that
                        is merged alone has had its weights for a round.
    delayed-nesterov    the buffer gathers t d of each merge; momentum decays, and moves the weights, once a round: by
                        lr mu buf with the merge that completes one.

Source: Decoupled DiLoCo (arXiv 2604.21428), outer SGD with Nesterov momentum; delayed Nesterov: "Asynchronous Local-SGD
Training for Language Modeling" (arXiv 2401.09135), algorithm 2 with c = 0. Momentum in fractions of rounds is this
project's.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from skerry.wire.policy import MergeRule, OuterName, OuterOptimizer


class OuterStep(NamedTuple):
    """What a commit names of the outer optimizer."""

    rate: float
    momentum: float
    decay: float
    gain: float


def outer_step(
    outer: OuterOptimizer,
    rule: MergeRule,
    *,
    steps_done: float,
    run_done: float,
    rounds_before: float,
    rounds_done: float,
    round_count: float,
) -> OuterStep:
    """Returns the scalars of a merge that stands for `round_count` rounds, T, above 0.

    `steps_done` inner steps, in `rounds_done` rounds, whole ones and parts, are behind the fragment since its momentum
    began; the rounds were `rounds_before` at the version before, or as many where there is none. `run_done` is the
    share of the run's planned steps that is behind it, 0 where none are planned.
    """
    rates = outer.rates(steps_done, rule, run_done=run_done)
    if outer.name is OuterName.DELAYED_NESTEROV:
        return _delayed(rates.learning_rate, rates.momentum, rounds_before, rounds_done, round_count)
    carried_count = min(round_count, 1.0)
    decay = rates.momentum**carried_count
    gain = (1 - decay) / (1 - rates.momentum)
    lead = min(1.0, 1.5 - carried_count) if outer.name is OuterName.LEADING_NESTEROV else 0.0
    fresh = 1 + lead * rates.momentum * carried_count / round_count
    carried = rates.momentum * (1 - lead * (1 - rates.momentum)) * carried_count / round_count
    return OuterStep(rates.learning_rate * round_count * fresh, carried / fresh, decay, gain)


def _delayed(
    learning_rate: float, momentum: float, rounds_before: float, rounds_done: float, round_count: float
) -> OuterStep:
    begins = rounds_done == rounds_before or _number(rounds_before) < _number(rounds_done)
    completes = _number(rounds_done) < _number(rounds_done + round_count)
    # The rate carries T, of which the momentum's part must have none.
    look_ahead = momentum / round_count if completes else 0.0
    return OuterStep(learning_rate * round_count, look_ahead, momentum if begins else 1.0, min(round_count, 1.0))


# Parts of rounds are sums of floats: what is this close below a whole round has completed it.
_SLACK: Final = 1e-6


def _number(rounds: float) -> int:
    return math.floor(rounds + _SLACK)
