"""What a child is told: JSON objects on its standard input, and a defect to have in its environment.

The calendar clock is stepped where the product's own clock reads it, `time.time`; monotonic time is left alone, as by
an operator or a time server that sets the machine's clock.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

MUTATION: Final = "SKERRY_CHAOS_MUTATION"
_REAL: Final = time.time


def obey(command: Callable[[dict[str, Any]], None]) -> None:
    """Calls `command` with each object from now on, on a thread of its own; steps the clock where one says so."""

    def listen() -> None:
        for line in sys.stdin:
            given = json.loads(line)
            if "clock_offset_s" in given:
                _step(given.pop("clock_offset_s"))
            if given:
                command(given)

    threading.Thread(target=listen, daemon=True, name="chaos-control").start()


def _step(offset_s: float) -> None:
    time.time = lambda: _REAL() + offset_s


def break_as_told() -> None:
    """Puts the defect of `tests/simulation/mutations.py` into this process that the environment names, if it does."""
    name = os.environ.get(MUTATION)
    if name:
        import pytest

        from tests.simulation.mutations import MUTATIONS

        next(one for one in MUTATIONS if one.name == name).apply(pytest.MonkeyPatch())
