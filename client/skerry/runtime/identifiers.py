"""The one place that draws real randomness: ids, and seeds for jitter."""

from __future__ import annotations

import random
import re
import secrets
import socket
from typing import Protocol


class Entropy(Protocol):
    """Where ids come from."""

    def hex_id(self) -> str:
        """Returns 128 fresh bits as 32 lower-case hexadecimal digits."""


class SystemEntropy:
    """The operating system's randomness: ids that no two processes share."""

    def hex_id(self) -> str:
        """Returns 128 random bits in hexadecimal."""
        return secrets.token_hex(16)


def system_random() -> random.Random:
    """Returns a generator for jitter, seeded by the machine so that processes do not retry in step."""
    return random.Random(secrets.randbits(64))


def new_learner_id() -> str:
    """Returns the host's name and a random suffix: the id of a learner that was given none."""
    host = re.sub("[^a-z0-9._-]+", "-", socket.gethostname().lower())[:48].strip("-._")
    return f"{host or 'learner'}-{secrets.token_hex(3)}"
