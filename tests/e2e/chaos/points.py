"""Fault points: an operation of one replica on one kind of object, struck before, in the middle of or after its effect.

A `Board` decides what happens to each operation. It is asked by `faulty_store.py` inside a replica (`file://`), and by
`gateway_proxy.py` between a replica and its gateway (`s3://`).
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class Moment(StrEnum):
    """When an operation is struck."""

    BEFORE = "before"
    TORN = "torn"  # half of it has happened: half of the bytes, of the names, of the entries
    AFTER = "after"


class Deed(StrEnum):
    """What strikes it."""

    ERROR = "error"
    KILL = "kill"  # SIGKILL of the replica


class Mode(StrEnum):
    """What a replica's way to the store is like."""

    FINE = "fine"
    DOWN = "down"
    SLOW = "slow"
    FLAKY = "flaky"
    FULL = "full"


class Operation(NamedTuple):
    """What a replica does, and on which kind of object."""

    verb: str
    kind: str


class Point(NamedTuple):
    """One fault point of one replica."""

    replica: int
    operation: Operation
    moment: Moment
    deed: Deed


class Strike(NamedTuple):
    """What happens to one operation."""

    moment: Moment
    deed: Deed = Deed.ERROR
    is_full: bool = False  # the error says that there is no space


def operation_of(verb: str, name: str) -> Operation:
    """Returns the operation on the object `name`, or on what lies below the folder `name`."""
    words = name.strip("/").split("/")
    if words[0] == "runs" and len(words) > 2:
        return Operation(verb, "names" if words[2] == "names" else words[3] if len(words) > 3 else "run")
    return Operation(verb, "probe" if words[0].startswith("probe-") else words[0])


def points_of(replica: int, operations: Iterable[Operation]) -> Iterator[Point]:
    """Yields every fault point of a replica that does these operations. Nothing of `sync_parent` can be torn."""
    for operation, moment, deed in itertools.product(sorted(operations), Moment, Deed):
        if moment is not Moment.TORN or operation.verb not in {"sync_parent", "head", "folders"}:
            yield Point(replica, operation, moment, deed)


@dataclass
class Board:
    """Decides for one replica what happens to each operation. Other threads may change its fields.

    While `is_striking`, it strikes operations at points that were not struck yet, one in `gap_s` at most, and kills the
    replica at one of them from `death_at_s` on.
    """

    seen: Callable[[Operation], None]  # called with each operation that is new
    hit: Callable[[Operation, Strike], None]  # called when a fault point is struck, before a death
    source: random.Random
    struck: set[tuple[Operation, Moment, Deed]]
    now_s: Callable[[], float] = time.monotonic
    mode: Mode = Mode.FINE
    is_striking: bool = False
    death_at_s: float = math.inf
    gap_s: float = 0.5
    flaky_share: float = 0.1
    slow_s: tuple[float, float] = (0.2, 1.5)
    _known: set[Operation] = field(default_factory=set)
    _strike_at_s: float = 0.0

    def strike(self, operation: Operation) -> Strike | None:
        """Returns what strikes the operation that begins now."""
        if operation not in self._known:
            self._known.add(operation)
            self.seen(operation)
        if self.mode is Mode.DOWN:
            return Strike(Moment.BEFORE)
        if self.mode is Mode.FULL and operation.verb in {"create", "write"}:
            return Strike(Moment.BEFORE, is_full=True)
        if self.is_striking and self.now_s() >= self._strike_at_s and (found := self._choose(operation)) is not None:
            self._strike_at_s = self.now_s() + self.gap_s * self.source.uniform(0.5, 1.5)
            self.struck.add((operation, found.moment, found.deed))
            self.hit(operation, found)
            return found
        if self.mode is Mode.FLAKY and self.source.random() < self.flaky_share:
            return Strike(self.source.choice(list(Moment)))
        return None

    def _choose(self, operation: Operation) -> Strike | None:
        """Returns a strike of the operation that was not there yet: a death, if it is time for one."""
        left = [
            Strike(point.moment, point.deed)
            for point in points_of(0, [operation])
            if (operation, point.moment, point.deed) not in self.struck
        ]
        deed = Deed.KILL if self.now_s() >= self.death_at_s else Deed.ERROR
        left = [one for one in left if one.deed is deed]
        return self.source.choice(left) if left else None

    def pause_s(self) -> float:
        """Returns how long the operation that begins now is delayed."""
        return self.source.uniform(*self.slow_s) if self.mode is Mode.SLOW else 0.0
