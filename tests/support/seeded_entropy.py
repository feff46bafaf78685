"""Ids that a seed decides, so that one seed gives one history."""

from __future__ import annotations

import random


class SeededEntropy:
    """Draws ids from a seeded generator."""

    def __init__(self, source: random.Random) -> None:
        """Takes the generator; every id advances it."""
        self._source = source

    def hex_id(self) -> str:
        """Returns the next 128 bits of the generator in hexadecimal."""
        return f"{self._source.getrandbits(128):032x}"
