"""Real time and random identifiers: the one module of the services that reads them; everything else is given them."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from typing import Protocol


class Clock(Protocol):
    """Time as a service sees it. Simulations pass one of their own."""

    def monotonic(self) -> float:
        """Returns seconds that never go back; only differences mean something, and only on one machine."""

    def unix(self) -> float:
        """Returns seconds since 1970 by the machine's clock: for people, never for decisions."""

    async def sleep(self, duration_s: float) -> None:
        """Returns after `duration_s` seconds of this clock."""


class Entropy(Protocol):
    """Where identifiers come from."""

    def hex_id(self) -> str:
        """Returns 128 random bits as 32 lower-case hexadecimal digits."""


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        """Returns seconds since some start."""
        return time.monotonic()

    def unix(self) -> float:
        """Returns seconds since 1970."""
        return time.time()

    async def sleep(self, duration_s: float) -> None:
        """Sleeps on the running loop."""
        await asyncio.sleep(duration_s)


class SystemEntropy:
    """The operating system's randomness: identifiers that no two processes share."""

    def hex_id(self) -> str:
        """Returns 128 random bits in hexadecimal."""
        return secrets.token_hex(16)


class SeededEntropy:
    """Identifiers that a seed decides, for simulations and golden files."""

    def __init__(self, source: random.Random) -> None:
        self._source = source

    def hex_id(self) -> str:
        """Returns the next 128 bits of the seeded source in hexadecimal."""
        return f"{self._source.getrandbits(128):032x}"
