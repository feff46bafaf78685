"""The one place of the client that draws real randomness: session, delta and request ids."""

from __future__ import annotations

import random
import secrets
from typing import Protocol


class Entropy(Protocol):
    """Where ids come from."""

    def hex_id(self) -> str:
        """Returns 128 fresh bits as 32 lower-case hexadecimal digits."""


class SystemEntropy:
    """The machine's own randomness."""

    def hex_id(self) -> str:
        """Returns 128 bits that nobody else draws."""
        return secrets.token_hex(16)


def system_random() -> random.Random:
    """Returns a generator for jitter, seeded by the machine so that learners do not retry in step."""
    return random.Random(secrets.randbits(64))
