"""Notices weights that something other than training has replaced in place, by a delta that jumps."""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from skerry.algorithm.rebase import FlatArray
from skerry.errors import StopExchangingError
from skerry.runtime.logs import get_logger

_log = get_logger(__name__)

# A jump goes so many times as far a step as any of the deltas before, and as far as from weights to others of their
# size. A learning rate that rises does not go so far in a round, and training that diverges goes further.
_LEAST_RATIO: Final = 16.0
_LEAST_SHARE: Final = 0.3
_MOST_SHARE: Final = 3.0
_COMPARED_COUNT: Final = 8
# Other weights of the same size have another direction. Training that turns so far makes them larger.
_MOST_COSINE: Final = 0.15
# A delta that moves weights by less than this share of them says nothing of how far the next ones go: they may have had
# no gradient, or a learning rate of nothing.
_LEAST_MOVED_SHARE: Final = 1e-4
_LEAST_NUMEL: Final = 1024  # in smaller vectors directions tell nothing
_LOOKED_AT_NUMEL: Final = 2**16


class Moves:
    """How far the last deltas of one fragment have gone a step."""

    def __init__(self) -> None:
        self._sizes: deque[float] = deque(maxlen=_COMPARED_COUNT)
        self._has_warned = False

    def check(
        self,
        delta: FlatArray,  # (numel,)
        base: FlatArray,  # (numel,) the weights that it starts from
        *,
        step_count: int,  # that it covers, at least 1
    ) -> None:
        """Compares a delta with the weights that it starts from and with the deltas before it; for a worker.

        Weights that turn to another direction are warned of and not refused: a model that is linear, or that a round
        solves, turns so far too.

        Raises:
            StopExchangingError: WEIGHTS_REPLACED: training does not explain it.
        """
        stride = max(1, len(delta) // _LOOKED_AT_NUMEL)
        delta, base = delta[::stride], base[::stride]
        moved, before, after = (_root_mean_square(values) for values in (delta, base, base - delta))
        size = moved / step_count
        largest = max(self._sizes, default=size)
        jumps = size >= _LEAST_RATIO * largest > 0 and _LEAST_SHARE * before <= moved <= _MOST_SHARE * before
        is_alike = len(base) >= _LEAST_NUMEL and before <= _MOST_SHARE * after <= _MOST_SHARE**2 * before
        product = (before**2 + after**2 - moved**2) / 2
        if is_alike and before > 0 and abs(product) <= _MOST_COSINE * before * after and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "the weights have turned to another direction. If a checkpoint was loaded after attaching, load it "
                "first, then attach: the run's weights win",
                cosine=round(product / (before * after), 3),
                steps=step_count,
            )
        if jumps:
            raise StopExchangingError(
                "WEIGHTS_REPLACED",
                "the weights were replaced after attaching: load your checkpoint first, then attach; the run's weights "
                f"win. moved_per_step={size:.3g}, largest_before={largest:.3g}, steps={step_count}",
            )
        if moved >= _LEAST_MOVED_SHARE * before:
            self._sizes.append(size)


def _root_mean_square(values: FlatArray) -> float:
    return math.sqrt((values * values).mean())
