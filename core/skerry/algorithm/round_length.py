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


def round_length(
    step_counts: Sequence[int], *, participation: float, missed_step_count: float, inner_step_count: int
) -> float:
    """Returns the inner steps that a round of these deltas stands for, if all take part.

    That is the longest delta's steps up to H: fewer than H where the round is a flush at a run's end. It is more, and
    then the shortest delta's, only after an outage that held up all: everybody is in it and brings more, and the run
    hardly went on without any of them, by `missed_step_count` at most (`FragmentState.missed_step_count`). A learner
    that comes back with the work of hours must not have the others' deltas stretched to it, nor, merged alone, move a
    run that went on without it by more than a round; nor may one whose deltas are late, once the others have left.
    """
    if not step_counts:
        return 0.0
    shortest, longest = min(step_counts), max(step_counts)
    was_outage = participation >= EVERYBODY and missed_step_count < MISSED_AFTER * inner_step_count
    return float(shortest if was_outage and shortest > inner_step_count else min(longest, inner_step_count))


# Of the expected weight. Not all of it: one that died meanwhile is expected for a round or two.
EVERYBODY: Final = 0.75
# Of a round: what a learner missed at most that was not away alone.
MISSED_AFTER: Final = 0.5
