"""A bounded series of figures over time, whose older points become sparser as it grows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

_MOST_POINTS: Final = 1000


class Point(NamedTuple):
    """A figure, and how far the run or the learner was when it was taken."""

    time_s: float  # since 1970
    step_count: float
    token_count: float
    value: float


class Series:
    """The points of one curve, oldest first: at most 1000, of which the older half is thinned when there are more."""

    def __init__(self) -> None:
        self._points: list[Point] = []
        self.added_count = 0

    def __len__(self) -> int:
        return len(self._points)

    def __iter__(self) -> Iterator[Point]:
        return iter(self._points)

    @property
    def last(self) -> Point | None:
        """The newest point, if there is one."""
        return self._points[-1] if self._points else None

    def add(self, point: Point) -> None:
        """Appends a point."""
        self._points.append(point)
        self.added_count += 1
        if len(self._points) > _MOST_POINTS:
            half = _MOST_POINTS // 2
            self._points[:half] = self._points[:half:2]

    def added_after(self, count: int) -> list[Point]:
        """Returns the points that came after the first `count`, as far as they are kept."""
        return self._points[-missing:] if (missing := self.added_count - count) > 0 else []

    def last_before(self, time_s: float) -> Point | None:
        """Returns the newest point that is not later than `time_s`, else the oldest; None if there is no point."""
        return next((point for point in reversed(self._points) if point.time_s <= time_s), next(iter(self), None))
