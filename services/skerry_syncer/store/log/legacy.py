"""Rules for entries of formats 1 and 2, which later formats replace by fields of the entry.

A close did not name its round's length. It followed from the deltas: the steps of the longest one, at most H, or those
of the shortest one after an outage of all. And the age of a base was counted in versions; now it is counted in rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

# The first format whose entries count staleness in rounds.
STALENESS_IN_ROUNDS_FORMAT: Final = 3


def round_length(
    step_counts: Sequence[int], *, participation: float, missed_step_count: float, inner_step_count: int
) -> float:
    """Returns a round's length in inner steps by the rule of formats 1 and 2."""
    shortest, longest = min(step_counts), max(step_counts)
    was_outage = participation >= 0.75 and missed_step_count < 0.5 * inner_step_count
    return float(shortest if was_outage and shortest > inner_step_count else min(longest, inner_step_count))
