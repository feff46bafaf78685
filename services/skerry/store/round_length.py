"""How many inner steps a round stands for, and what each of its deltas counts: pure functions of what the log says.

Learners of different speed bring deltas of different length. A plain weighted mean of them would shorten the step with
every slow learner that takes part. So each delta is first *stretched* to H steps, as if its learner had gone on in the
direction that it took. What is stretched most is known least, and weighs least: by its tokens times the share of H that
it holds. The step that is taken then goes as many times H steps as the round stands for.

Source: normalised averaging (FedNova, arXiv 2007.07481), with H in place of the clients' mean; weights by tokens and
steps as in Decoupled DiLoCo (arXiv 2604.21428).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final


def delta_weight(step_count: int, token_count: int, *, inner_step_count: int, weight_cap: float) -> float:
    """Returns w of a delta before any damping: its tokens, times the share of H that its steps are, at most 1.

    Tokens of more than `weight_cap` times H steps do not count: else a learner that was long away would outweigh all
    others.
    """
    if step_count <= 0:
        return 0.0
    share = step_count / inner_step_count
    return token_count * min(share, 1.0, weight_cap / share)


def round_length(step_counts: Sequence[int], *, participation: float, inner_step_count: int) -> float:
    """Returns the inner steps that a round of these deltas stands for, if all take part.

    That is the longest delta's steps up to H: fewer than H where the round is a flush at a run's end. It is more only
    where everybody brings more, as after an outage that held up all: then the shortest delta's. One learner that comes
    back with the work of hours must not have the others' deltas stretched to it, nor, merged alone, move a run that
    went on without it by more than a round.
    """
    if not step_counts:
        return 0.0
    shortest, longest = min(step_counts), max(step_counts)
    if shortest > inner_step_count and participation >= EVERYBODY:
        return float(shortest)
    return float(min(longest, inner_step_count))


# Of the expected weight: with so much of it in a round, nobody went on without those who are in it.
EVERYBODY: Final = 0.75
