"""The campaign's child processes: started, signalled, told, and ended with their parent whatever becomes of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class Child:
    """One process after another under one name."""

    def __init__(self, name: str, folder: Path, *, env: dict[str, str] | None = None) -> None:
        """Its output goes to `NAME.log` in the folder."""
        self.name = name
        self.log = folder / f"{name}.log"
        self.start_count = 0
        self.is_stopped = False
        self.is_wanted = False  # whether it should be running
        self._env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._others: list[subprocess.Popen[bytes]] = []  # older processes of that name that still live

    @property
    def is_alive(self) -> bool:
        """Whether the newest process has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def status(self) -> int | None:
        """The newest process's exit status, negative for a signal; None while it runs or was never started."""
        return None if self._process is None else self._process.poll()

    def start(self, module: str, *words: str) -> None:
        """Starts a process; one that is there already goes on beside it."""
        if self._process is not None and self._process.poll() is None:
            self._others.append(self._process)
        with self.log.open("ab") as log:
            # It is killed with the thread that started it, so nothing is left when the harness is killed.
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig=KILL", sys.executable, "-B", "-m", module, *words],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
            )
        self.start_count += 1
        self.is_stopped, self.is_wanted = False, True

    def tell(self, **given: Any) -> None:
        """Sends the newest process an object."""
        if self._process is None or self._process.stdin is None or self.is_stopped:
            return
        try:
            self._process.stdin.write(json.dumps(given).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            return  # it is dead

    def signal(self, number: signal.Signals) -> None:
        """Sends the newest process a signal, if it lives."""
        if self._process is not None and self.is_alive:
            self._process.send_signal(number)
            self.is_stopped = (self.is_stopped or number is signal.SIGSTOP) and number is not signal.SIGCONT

    def wake_all(self) -> None:
        """Continues every process of that name."""
        self.is_stopped = False
        for process in (*self._others, *filter(None, [self._process])):
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)

    def end(self, timeout_s: float = 10.0) -> None:
        """Kills every process of that name and waits for them."""
        deadline_s = time.monotonic() + timeout_s
        for process in (*self._others, *filter(None, [self._process])):
            if process.poll() is None:
                process.kill()
            process.wait(max(0.1, deadline_s - time.monotonic()))
            if process.stdin is not None:
                process.stdin.close()
