"""Runs the end-to-end tests: first those that measure, alone, then the storms, and beside them all others.

`python tests/e2e/lanes.py [what pytest takes]`; what the last two say is in build/e2e/*.txt, and printed at their end.
The last line is the summary of the last that ran tests.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

_LOGS: Final = Path("build/e2e")
_BESIDE: Final = {"storms": "e2e and storm", "others": "e2e and not alone and not storm"}
_NOTHING_TO_RUN: Final = 5


def main() -> int:
    """Returns the exit status of a lane that failed, or 0."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was begun is ended
    print("test-e2e: floods and benchmarks, which measure", flush=True)
    statuses = [subprocess.run(_command("e2e and alone"), check=False).returncode]
    print(f"test-e2e: storms, and containers and real servers beside them; see {_LOGS}/*.txt", flush=True)
    statuses += _run_beside()
    return next((status for status in statuses if status not in (0, _NOTHING_TO_RUN)), 0)


def _run_beside() -> list[int]:
    _LOGS.mkdir(parents=True, exist_ok=True)
    logs = {name: _LOGS / f"{name}.txt" for name in _BESIDE}
    lanes: list[subprocess.Popen[bytes]] = []
    try:
        for name, marks in _BESIDE.items():
            with logs[name].open("wb") as log:
                command = _command(marks)
                lanes.append(subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True))
        statuses = [lane.wait() for lane in lanes]
    finally:
        for lane in lanes:
            if lane.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(lane.pid, signal.SIGINT)  # with all that it began; pytest then tears its servers down
                lane.wait()
    # Those that ran something last, so that a summary of passed tests ends the output.
    for name, status in sorted(zip(logs, statuses, strict=True), key=lambda one: one[1] != _NOTHING_TO_RUN):
        print(f"test-e2e: {name}, status {status}", flush=True)
        sys.stdout.write(logs[name].read_text(encoding="utf-8", errors="replace"))
    sys.stdout.flush()
    return statuses


def _command(marks: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-m", marks, "-rs", *sys.argv[1:]]


if __name__ == "__main__":
    sys.exit(main())
