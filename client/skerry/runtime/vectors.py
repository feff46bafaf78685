"""Flat float32 vectors of a fragment's size, whose memory is used again.

The kernel clears every page of fresh memory when it is first touched, which takes longer than a pass of arithmetic over
it. `malloc` hands such large blocks back to the kernel as soon as they are freed.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np
from numpy.typing import NDArray

# Smaller vectors come from malloc's own free lists.
_SMALLEST_NUMEL: Final = 2**16
# A fragment that is adopted frees three vectors: its anchor, its delta and its shift. The next ones take them. Where
# many fragments move at once, four were too few: a fifth of a learner's time went into clearing fresh memory.
_MOST_KEPT: Final = 32
_kept: Final[deque[NDArray[np.float32]]] = deque(maxlen=_MOST_KEPT)


class _Lease:
    """What a vector and all its views refer to; when it goes, nothing refers to the memory any more."""

    def __init__(self, memory: NDArray[np.float32], numel: int) -> None:
        self._memory = memory
        self.__array_interface__ = memory[:numel].__array_interface__

    def __del__(self, kept: deque[NDArray[np.float32]] = _kept) -> None:
        kept.append(self._memory)


def vector(numel: int) -> NDArray[np.float32]:
    """Returns `(numel,)` numbers of any value, in memory that has been touched before; any thread may call it."""
    if numel < _SMALLEST_NUMEL:
        return np.zeros(numel, np.float32)
    for _ in range(len(_kept)):
        try:
            memory = _kept.popleft()
        except IndexError:  # another thread took it
            break
        if numel <= len(memory) <= 2 * numel:
            return np.asarray(_Lease(memory, numel))
        _kept.append(memory)
    return np.asarray(_Lease(np.full(numel, 0, np.float32), numel))
