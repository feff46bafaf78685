"""Vectors of the exchange that are too large for one rank of an island: each rank keeps a range of each of them.

The leader's workers write and read them at any time, beside the training. So every other rank has a thread that does
what the leader asks, over a gloo group of its own. Nothing here touches the model.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from datetime import timedelta
from enum import IntEnum
from itertools import count
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from skerry.client.errors import StopExchangingError
from skerry.client.island import Island

# A leader may ask for nothing for days. A rank that is gone is noticed by the training before that.
_SILENCE: Final = timedelta(days=1000)


class _Request(IntEnum):
    KEEP = 0
    READ = 1
    FORGET = 2


class Spread:
    """A float32 vector of the leader's whose ranges lie on all ranks. NumPy takes it for an array, which copies it."""

    def __init__(self, shelf: Shelf, key: int, numel: int) -> None:
        self._shelf = shelf
        self._key = key
        self._numel = numel

    def __array__(self, dtype: Any = None, *, copy: bool | None = None) -> NDArray[np.float32]:
        return self._shelf.read(self._key, 0, self._numel, self._numel)

    def __getitem__(self, inside: slice) -> NDArray[np.float32]:
        first, stop, _ = inside.indices(self._numel)
        return self._shelf.read(self._key, first, stop, self._numel)

    def __del__(self) -> None:
        self._shelf.forgotten.append(self._key)


class Shelf:
    """What one rank keeps of the leader's vectors. Any thread of the leader may use it, one at a time."""

    def __init__(self, island: Island) -> None:
        """Every rank of the island makes one, at the same time."""
        self._island = island
        self._group = island.new_group(_SILENCE)
        self._parts: dict[int, torch.Tensor] = {}
        self._keys = count()
        self._lock = threading.Lock()
        self.forgotten: deque[int] = deque()  # keys that nothing refers to, told to the others with the next request
        if not island.is_leader:
            threading.Thread(target=self._serve, name="skerry-shelf", daemon=True).start()

    def keep(self, values: NDArray[np.float32]) -> Spread:
        """Returns a copy of `values`, spread over the ranks."""
        vector = torch.from_numpy(values)
        with self._lock:
            self._forget()
            key = next(self._keys)
            bounds = self._bounds(len(vector))
            for rank in range(1, self._island.size):
                part = vector[bounds[rank] : bounds[rank + 1]]
                self._ask(rank, _Request.KEEP, key, 0, len(part))
                self._island.send(part, rank, self._group)
            self._parts[key] = vector[: bounds[1]].clone()
        return Spread(self, key, len(vector))

    def read(self, key: int, first: int, stop: int, numel: int) -> NDArray[np.float32]:
        """Returns the elements from `first` to before `stop` of a vector of `numel`."""
        out = torch.empty(stop - first)
        with self._lock:
            self._forget()
            bounds = self._bounds(numel)
            for rank in range(self._island.size):
                start, end = max(first, bounds[rank]), min(stop, bounds[rank + 1])
                if start >= end:
                    continue
                place = out[start - first : end - first]
                if rank == 0:
                    place.copy_(self._parts[key][start:end])
                else:
                    self._ask(rank, _Request.READ, key, start - bounds[rank], end - start)
                    self._island.receive(place, rank, self._group)
        return out.numpy()

    def _bounds(self, numel: int) -> list[int]:
        return [numel * rank // self._island.size for rank in range(self._island.size + 1)]

    def _forget(self) -> None:
        while self.forgotten:
            key = self.forgotten.popleft()
            del self._parts[key]
            for rank in range(1, self._island.size):
                self._ask(rank, _Request.FORGET, key, 0, 0)

    def _ask(self, rank: int, *request: int) -> None:
        self._island.send(torch.tensor(request), rank, self._group)

    def _serve(self) -> None:
        """Does what the leader asks until it leaves."""
        request = torch.empty(4, dtype=torch.int64)
        with suppress(StopExchangingError):
            while True:
                self._island.receive(request, 0, self._group)
                what, key, first, numel = request.tolist()
                if what == _Request.KEEP:
                    self._parts[key] = torch.empty(numel)
                    self._island.receive(self._parts[key], 0, self._group)
                elif what == _Request.READ:
                    self._island.send(self._parts[key][first : first + numel], 0, self._group)
                else:
                    del self._parts[key]
