"""The contents of objects that this process wrote a moment ago and is about to read, in memory within a bound.

They save reading, decompressing and checking. Everything else is read from the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Generic, TypeVar

Content = TypeVar("Content")

# Smaller objects are left out: with what Python takes for each of them, they would exceed the bound.
SMALLEST_BYTES: Final = 4 * 2**10


class RecentContents(Generic[Content]):
    """The contents of some objects by name; the oldest go first."""

    def __init__(self, limit_bytes: int) -> None:
        """Holds at most `limit_bytes`."""
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self._contents: dict[str, tuple[Sequence[Content], int]] = {}

    def put(self, name: str, content: Sequence[Content], size_bytes: int) -> None:
        """Holds a new object's content, `size_bytes` in memory, if it is neither too small nor too large."""
        if SMALLEST_BYTES <= size_bytes <= self._limit_bytes:
            while self._used_bytes + size_bytes > self._limit_bytes:
                self.take(next(iter(self._contents)))
            self._contents[name] = content, size_bytes
            self._used_bytes += size_bytes

    def get(self, name: str) -> Sequence[Content]:
        """Returns the object's content; nothing if it is not held."""
        return self._contents.get(name, ((), 0))[0]

    def take(self, name: str) -> Sequence[Content]:
        """Returns the object's content and drops it; nothing if it is not held."""
        content, size_bytes = self._contents.pop(name, ((), 0))
        self._used_bytes -= size_bytes
        return content
