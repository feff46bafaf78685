"""A system small enough for the tests: two learners average a vector through files."""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rivals.peers.dialogue import converse


class Learner:
    """Writes its vector, and waits for everybody's."""

    def __init__(self, arguments: Namespace) -> None:
        self._folder: Path = arguments.folder
        self._number: int = arguments.number
        self._learner_count: int = arguments.learners
        self._round = 0
        self._vector = np.zeros(1000, np.float32)

    def weights(self) -> list[Any]:
        """Returns the vector."""
        return [self._vector]

    def prepare(self) -> None:
        """Nothing is needed."""

    def synchronise(self) -> None:
        """Averages."""
        own = self._path(self._number)
        unfinished = own.with_suffix(".part")
        unfinished.write_bytes(self._vector.tobytes())
        unfinished.rename(own)
        paths = [self._path(number) for number in range(self._learner_count)]
        while not all(path.exists() for path in paths):
            time.sleep(0.01)
        self._vector[:] = np.mean([np.frombuffer(path.read_bytes(), np.float32) for path in paths], axis=0)
        self._round += 1

    def _path(self, number: int) -> Path:
        return self._folder / f"{self._round}-{number}.vector"


def serve(_: Namespace) -> str:
    """Returns an address, which nobody needs."""
    return "nowhere"


if __name__ == "__main__":
    converse(serve, Learner)
