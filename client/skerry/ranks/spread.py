"""Vectors of the exchange that are too large for one rank of an island: each rank keeps a range of each of them.

The leader's workers write and read them at any time, beside the training. So every other rank has a thread that does
what the leader asks, over a gloo group of its own. Nothing here touches the model, but for the shares of it that the
training threads have copied.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from enum import IntEnum
from itertools import count
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from skerry.algorithm.rebase import FlatArray
from skerry.errors import StopExchangingError
from skerry.model.torch.shards import Box
from skerry.ranks.island import Island
from skerry.ranks.ranges import even_bounds, range_boxes, to_boxes, to_ranges
from skerry.wire import FragmentLayout, TensorSpec

# A leader may ask for nothing for days. A rank that is gone is noticed by the training before that.
_SILENCE: Final = timedelta(days=1000)
# How long a rank waits for a vector that the leader has sent already.
_COMING_S: Final = 60.0
# How long a rank that leaves waits for the leader's last request, and the leader for what is asked before it.
_LAST: Final = timedelta(seconds=3)


class _Request(IntEnum):
    KEEP = 0
    READ = 1
    FORGET = 2
    DO = 3
    END = 4


class Kept:
    """What all ranks keep under a key, until the leader refers to it no more."""

    def __init__(self, shelf: Shelf) -> None:
        self.key = shelf.new_key()
        self._shelf = shelf

    def __del__(self) -> None:
        self._shelf.forgotten.append(self.key)


class Spread(Kept):
    """A float32 vector of the leader's whose ranges lie on all ranks, which add and subtract them.

    NumPy takes it for an array, which copies it to the leader.
    """

    def __init__(self, shelf: Shelf, numel: int, bounds: Sequence[int] = ()) -> None:
        """Without bounds each rank has its share of the weights of `layout`, until ranges are asked for."""
        super().__init__(shelf)
        self.numel = numel
        self.shape = (numel,)
        self.bounds = list(bounds)
        self.layout: FragmentLayout | None = None

    def __array__(self, dtype: Any = None, *, copy: bool | None = None) -> NDArray[np.float32]:
        return self._shelf.read(self, 0, self.numel)

    def __getitem__(self, inside: slice) -> NDArray[np.float32]:
        first, stop, _ = inside.indices(self.numel)
        return self._shelf.read(self, first, stop)

    def __add__(self, other: FlatArray) -> Spread:
        return self._shelf.combined(self, other, alpha=1)

    def __sub__(self, other: FlatArray) -> Spread:
        return self._shelf.combined(self, other, alpha=-1)


class Shelf:
    """What one rank keeps for the leader. Any thread of the leader may use it, one at a time."""

    def __init__(
        self,
        island: Island,
        specs: Mapping[str, TensorSpec],
        boxes_of: Callable[..., list[list[Box]]],
        to_host: Callable[[FlatArray], NDArray[np.float32]],
    ) -> None:
        """Every rank of the island makes one, at the same time.

        `boxes_of` says what each rank holds of a fragment's weights; with `once=True`, what others hold too only at one
        of them, which is what a snapshot copies. `to_host` copies it to the host.
        """
        self.island = island
        self.group = island.new_group(_SILENCE)
        self.things: dict[int, Any] = {}  # by key
        self.tasks: dict[str, Callable[..., Any]] = {
            "settle": self._settle,
            "combine": self._combine,
            "hand_out": self._hand_out,
        }
        self.forgotten: deque[int] = deque()  # keys that nothing refers to, told to the others with the next request
        self._specs = specs
        self._boxes_of = boxes_of
        self._to_host = to_host
        self._keys = count()
        self._lock = threading.RLock()
        self._has_come = threading.Condition()
        self._is_over = False  # the leader asks no more
        self._server = threading.Thread(target=self._serve, name="skerry-shelf", daemon=True)
        if not island.is_leader:
            self._server.start()

    def close(self) -> None:
        """Ends the threads of the other ranks: the leader tells them to end, and every other rank waits for its own.

        The leader's exchange must be over. A thread that returns from torch while the interpreter shuts down makes the
        process abort.
        """
        if self.island.is_leader:
            has_lock = self._lock.acquire(timeout=_LAST.total_seconds())
            self._is_over = True
            end = [torch.tensor([_Request.END, 0, 0, 0])]
            for rank in range(1, self.island.size):
                with suppress(RuntimeError):  # the rank is gone; this rank may have left the island, or destroyed all
                    self.group.send(end, rank, 0).wait(_LAST)
            if has_lock:
                self._lock.release()
        elif not self.island.has_left:
            self._server.join(_LAST.total_seconds())

    # At the leader.

    def new_key(self) -> int:
        """Returns a key for something that ranks are to keep."""
        return next(self._keys)

    def keep(self, values: NDArray[np.float32]) -> Spread:
        """Returns a copy of `values`, spread over the ranks."""
        vector = torch.from_numpy(values)
        with self._lock:
            self._forget()
            bounds = even_bounds(len(vector), self.island.size)
            spread = Spread(self, len(vector), bounds)
            for rank in range(1, self.island.size):
                part = vector[bounds[rank] : bounds[rank + 1]]
                self._ask(rank, _Request.KEEP, spread.key, 0, len(part))
                self.island.send(part, rank, self.group)
            self.things[spread.key] = vector[: bounds[1]].clone()
        return spread

    def combined(self, left: Spread, right: FlatArray, *, alpha: int) -> Spread:
        """Returns left + alpha right."""
        right = right if isinstance(right, Spread) else self.keep(right)
        sum_ = Spread(self, left.numel, even_bounds(left.numel, self.island.size))
        operands = [self.described(left), self.described(right)]
        self.do("combine", key=sum_.key, operands=operands, alpha=alpha, bounds=sum_.bounds)
        return sum_

    def shares(self, values: Spread, layout: FragmentLayout) -> Kept:
        """Returns what has each rank keep what it holds of the fragment, of these values."""
        kept = Kept(self)
        bounds = values.bounds or even_bounds(values.numel, self.island.size)
        tensors = [one.name for one in layout.tensors]
        self.do("hand_out", key=kept.key, values=self.described(values), bounds=bounds, tensors=tensors)
        return kept

    def read(self, spread: Spread, first: int, stop: int) -> NDArray[np.float32]:
        """Returns the elements from `first` to before `stop` of a vector."""
        out = torch.empty(stop - first, dtype=torch.float32)
        with self._lock:
            if not spread.bounds:
                self.even_out(spread)
            self._forget()
            bounds = spread.bounds
            for rank in range(self.island.size):
                start, end = max(first, bounds[rank]), min(stop, bounds[rank + 1])
                if start >= end:
                    continue
                place = out[start - first : end - first]
                if rank == 0:
                    place.copy_(self.things[spread.key][start:end])
                else:
                    self._ask(rank, _Request.READ, spread.key, start - bounds[rank], end - start)
                    self.island.receive(place, rank, self.group)
        return out.numpy()

    def even_out(self, spread: Spread) -> None:
        """Has each rank keep an even range of a vector, however it is spread now."""
        bounds = even_bounds(spread.numel, self.island.size)
        self.do("settle", **self.described(spread), bounds=bounds)
        spread.bounds = bounds

    def do(self, task: str, *, ranks: Iterable[int] | None = None, **arguments: Any) -> list[Any]:
        """Has all ranks, or these, do one of their `tasks` at the same time; returns what each returned.

        Arguments and results are what JSON has.

        Raises:
            RuntimeError: one of them failed by a defect; its message has the cause.
        """
        with self._lock:
            self._forget()
            ranks = range(self.island.size) if ranks is None else list(ranks)
            for rank in ranks:
                if rank > 0:
                    self._say(rank, {"task": task, **arguments})
            own = [self._done(task, arguments)] if 0 in ranks else []
            answers = [*own, *(self._answer(rank) for rank in ranks if rank > 0)]
        for rank, answer in zip(ranks, answers, strict=True):
            if "because" in answer:
                raise RuntimeError(f"a rank failed. rank={rank}, task={task}, because={answer['because']}")
        return [answer["result"] for answer in answers]

    def described(self, spread: Spread) -> dict[str, Any]:
        """Returns what says to the ranks which vector it is, and how they hold it."""
        tensors = [one.name for one in spread.layout.tensors] if spread.layout else []
        return {"key": spread.key, "now": spread.bounds, "tensors": tensors}

    def _say(self, rank: int, said: Mapping[str, Any]) -> None:
        data = torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)
        self._ask(rank, _Request.DO, 0, 0, len(data))
        self.island.send(data, rank, self.group)

    def _answer(self, rank: int) -> Any:
        size = torch.empty(1, dtype=torch.int64)
        self.island.receive(size, rank, self.group)
        return self._heard(rank, int(size))

    def _heard(self, rank: int, size: int) -> Any:
        data = torch.empty(size, dtype=torch.uint8)
        self.island.receive(data, rank, self.group)
        return json.loads(data.numpy().tobytes())

    def _forget(self) -> None:
        while self.forgotten:
            key = self.forgotten.popleft()
            self.things.pop(key, None)
            for rank in range(1, self.island.size):
                self._ask(rank, _Request.FORGET, key, 0, 0)

    def _ask(self, rank: int, *request: int) -> None:
        if self._is_over:
            raise StopExchangingError("RANK_LEFT", "this rank has left its island")
        self.island.send(torch.tensor(request), rank, self.group)

    # At every rank.

    def part(self, key: int) -> torch.Tensor:
        """Returns what this rank keeps of a vector, which is not written to, once the leader has sent it.

        Raises:
            StopExchangingError: RANK_LEFT.
        """
        with self._has_come:
            if not self._has_come.wait_for(lambda: key in self.things, _COMING_S):
                raise StopExchangingError("RANK_LEFT", f"the first rank did not send a vector in {_COMING_S:g} s")
            part: torch.Tensor = self.things[key]
            return part

    def ranged(self, key: int, now: list[int], tensors: list[str], bounds: list[int]) -> torch.Tensor:
        """Returns this rank's range of a vector that is held as `described`; every rank calls it at the same time."""
        held = self.things[key]
        if now:
            return held if now == bounds else to_ranges(self.island, self.group, held, range_boxes(now), bounds)
        boxes = self._boxes_of(self._layout(tensors), once=True)
        return to_ranges(self.island, self.group, torch.from_numpy(self._to_host(held)), boxes, bounds)

    def _settle(self, *, key: int, now: list[int], tensors: list[str], bounds: list[int]) -> None:
        self.things[key] = self.ranged(key, now, tensors, bounds)

    def _combine(self, *, key: int, operands: list[dict[str, Any]], alpha: int, bounds: list[int]) -> None:
        left, right = (self.ranged(**one, bounds=bounds) for one in operands)
        self.things[key] = torch.add(left, right, alpha=alpha)

    def _hand_out(self, *, key: int, values: dict[str, Any], bounds: list[int], tensors: list[str]) -> None:
        held = self.ranged(**values, bounds=bounds)
        boxes = self._boxes_of(self._layout(tensors), once=False)
        self.things[key] = to_boxes(self.island, self.group, held, bounds, boxes)

    def _layout(self, tensors: list[str]) -> FragmentLayout:
        return FragmentLayout("", tuple(self._specs[name] for name in tensors))

    def _done(self, task: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the result of a task, or why it failed."""
        try:
            return {"result": self.tasks[task](**arguments)}
        except StopExchangingError:
            raise
        except Exception as error:  # noqa: BLE001 - told to the leader, which waits for it
            return {"because": repr(error)}

    # At other ranks.

    def _serve(self) -> None:
        """Does what the leader asks until it leaves."""
        request = torch.zeros(4, dtype=torch.int64)
        with suppress(StopExchangingError):
            while request[0] != _Request.END:
                self.island.receive(request, 0, self.group)
                what, key, first, numel = request.tolist()
                if what == _Request.KEEP:
                    part = torch.empty(numel, dtype=torch.float32)
                    self.island.receive(part, 0, self.group)
                    with self._has_come:
                        self.things[key] = part
                        self._has_come.notify_all()
                elif what == _Request.READ:
                    self.island.send(self.things[key][first : first + numel], 0, self.group)
                elif what == _Request.FORGET:
                    self.things.pop(key, None)
                elif what == _Request.DO:
                    arguments = self._heard(0, numel)
                    answer = json.dumps(self._done(arguments.pop("task"), arguments)).encode()
                    self.island.send(torch.tensor([len(answer)]), 0, self.group)
                    self.island.send(torch.frombuffer(bytearray(answer), dtype=torch.uint8), 0, self.group)
