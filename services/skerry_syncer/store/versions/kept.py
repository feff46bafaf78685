"""What this process wrote a moment ago and is about to read: kept in memory, within a bound.

It saves reading, decompressing and checking. What is not kept here is read from the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Generic, TypeVar

Content = TypeVar("Content")

# Int4 deltas of 120 million elements, decompressed. The bound is for the whole run, however many learners it has.
LIMIT_BYTES: Final = 64 * 2**20
# Smaller objects are not kept: with what Python takes for each of them, they would exceed the bound.
SMALLEST_BYTES: Final = 4 * 2**10


class Kept(Generic[Content]):
    """The contents of some objects by name; the oldest go first."""

    def __init__(self, limit_bytes: int) -> None:
        """Keeps at most `limit_bytes`."""
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self._contents: dict[str, tuple[Sequence[Content], int]] = {}

    def put(self, name: str, content: Sequence[Content], size_bytes: int) -> None:
        """Keeps the object's content, `size_bytes` in memory, if it is neither too small nor too large."""
        if SMALLEST_BYTES <= size_bytes <= self._limit_bytes:
            self.take(name)
            while self._used_bytes + size_bytes > self._limit_bytes:
                self.take(next(iter(self._contents)))
            self._contents[name] = content, size_bytes
            self._used_bytes += size_bytes

    def get(self, name: str) -> Sequence[Content]:
        """Returns the object's content; nothing if it is not kept."""
        return self._contents.get(name, ((), 0))[0]

    def take(self, name: str) -> Sequence[Content]:
        """Returns the object's content, which is not kept from now on; nothing if it was not."""
        content, size_bytes = self._contents.pop(name, ((), 0))
        self._used_bytes -= size_bytes
        return content
