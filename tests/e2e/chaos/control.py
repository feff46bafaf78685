"""What a child is told: JSON objects on its standard input, and a defect to have in its environment.

The calendar clock is stepped in the product's own clock; monotonic time is left alone, as by an operator or a time
server that sets the machine's clock. `time.time` itself can't be stepped: gRPC adds a call's timeout to it in Python
and compares the sum with the machine's clock in C, so every call would be late.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, Final

from skerry.runtime.clock import SystemClock

MUTATION: Final = "SKERRY_CHAOS_MUTATION"
_REAL: Final = SystemClock.unix_s


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
    setattr(SystemClock, "unix_s", lambda clock: _REAL(clock) + offset_s)  # noqa: B010 - mypy allows no other way


def break_as_told() -> None:
    """Puts the defect of `tests/simulation/mutations.py` into this process that the environment names, if it does."""
    name = os.environ.get(MUTATION)
    if name:
        import pytest

        from tests.simulation.mutations import MUTATIONS

        next(one for one in MUTATIONS if one.name == name).apply(pytest.MonkeyPatch())
