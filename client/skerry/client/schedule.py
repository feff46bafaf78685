"""When a learner contributes to a fragment: by inner steps, never by the clock."""

from __future__ import annotations


def first_contributions(fragment_count: int, inner_step_count: int) -> tuple[int, ...]:
    """Returns, for each fragment, the step from which its first H steps are counted.

    They are spread over H, so that about fragment_count / H fragments move a step; later rounds keep that spread by
    themselves. The first delta of a fragment thus holds H to nearly 2 H steps: fewer than H would open no round.
    """
    return tuple(number * inner_step_count // fragment_count for number in range(fragment_count))


def is_due(step_count: int, *, contributed_step: int, inner_step_count: int) -> bool:
    """Whether H steps have passed since the last accepted contribution; adoption does not restart the count."""
    return step_count - contributed_step >= inner_step_count
