"""Notices weights that something other than training has replaced in place, by their direction."""

from __future__ import annotations

import math
from typing import Final

from skerry.algorithm.rebase import FlatArray
from skerry.runtime.logs import get_logger

_log = get_logger(__name__)

# Other weights of the same size have another direction. Training that turns so far makes them larger.
_MOST_COSINE: Final = 0.15
_MOST_RATIO: Final = 3.0  # of sizes that are alike
_LEAST_NUMEL: Final = 1024  # in smaller vectors directions tell nothing
_LOOKED_AT_NUMEL: Final = 2**12


def warn_of_turn(
    delta: FlatArray,  # (numel,)
    base: FlatArray,  # (numel,) the weights that it starts from
) -> bool:
    """Warns if a delta turns the weights to another direction, and returns whether it does. Called in a worker thread.

    It is not refused: a model that is linear, or that a round solves, turns so far too.
    """
    stride = max(1, len(delta) // _LOOKED_AT_NUMEL)
    delta, base = delta[::stride], base[::stride]
    moved, before, after = (_root_mean_square(values) for values in (delta, base, base - delta))
    is_alike = len(base) >= _LEAST_NUMEL and 0 < before <= _MOST_RATIO * after <= _MOST_RATIO**2 * before
    cosine = (before**2 + after**2 - moved**2) / (2 * before * after) if is_alike else 1.0
    has_turned = abs(cosine) <= _MOST_COSINE
    if has_turned:
        _log.warning(
            "the weights have turned to another direction. If a checkpoint was loaded after attaching, load it first, "
            "then attach: the run's weights win",
            cosine=round(cosine, 3),
        )
    return has_turned


def _root_mean_square(values: FlatArray) -> float:
    return math.sqrt((values * values).mean())
