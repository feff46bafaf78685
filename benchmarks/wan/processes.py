"""Processes that a benchmark starts and talks to: one line of JSON a command, one an answer, each within a time."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
_END_S: Final = 10.0
_TAIL: Final = 2000
_IDLE_S: Final = 0.4
_IDLE_SHARE: Final = 0.1


class Process:
    """A process that answers commands; what it writes to stderr goes to a log."""

    def __init__(self, command: Sequence[str], log: Path, *, node: str = "", env: dict[str, str] | None = None) -> None:
        """Starts it, in the network namespace `node` if one is named."""
        self._log = log
        self._pending = b""
        prefix = ["ip", "netns", "exec", node] if node else []
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*prefix, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env={**environment(), **(env or {})},
                cwd=log.parent,
            )
        assert self._process.stdout is not None
        self.pid = self._process.pid
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)

    def tell(self, **command: Any) -> None:
        """Sends a command.

        Raises:
            RuntimeError: the process has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._ended() from error

    def hear(self, timeout_s: float) -> Any:
        """Returns the next answer.

        Raises:
            RuntimeError: the process has ended; the message has the end of its log.
            TimeoutError: it did not answer in time.
        """
        assert self._process.stdout is not None
        deadline_s = time.monotonic() + timeout_s
        while b"\n" not in self._pending:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not self._selector.select(left_s):
                raise TimeoutError(f"no answer in time. timeout_s={timeout_s}, log={self._tail()}")
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                raise self._ended()
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return json.loads(line)

    def signal(self, number: int) -> None:
        """Sends it a signal."""
        self._process.send_signal(number)

    def end(self) -> None:
        """Kills it."""
        self._process.kill()
        self._process.wait(_END_S)
        self._selector.close()
        for pipe in filter(None, (self._process.stdin, self._process.stdout)):
            pipe.close()

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-_TAIL:]

    def _ended(self) -> RuntimeError:
        return RuntimeError(f"process has ended. log={self._tail()}")


def environment() -> dict[str, str]:
    """Returns this process's environment, with one thread a library, and this project's packages on the path."""
    path = [str(ROOT), *(entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry)]
    resolved = os.pathsep.join(str((ROOT / entry).resolve()) for entry in path)
    return {**os.environ, "PYTHONPATH": resolved, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def all_hear(processes: Sequence[Process], timeout_s: float, **command: Any) -> list[Any]:
    """Tells all the same, and returns their answers."""
    for process in processes:
        process.tell(**command)
    return [process.hear(timeout_s) for process in processes]


def wait_idle(timeout_s: float) -> None:
    """Returns when the other processes of this pid namespace together have nearly stopped working, or after a time."""
    deadline_s = time.monotonic() + timeout_s
    before = _ticks()
    while time.monotonic() < deadline_s:
        time.sleep(_IDLE_S)
        now = _ticks()
        if (now - before) / os.sysconf("SC_CLK_TCK") <= _IDLE_SHARE * _IDLE_S:
            return
        before = now


def cpu_s() -> float:
    """Returns the CPU seconds that living processes of this pid namespace took so far, without this one."""
    return _ticks() / os.sysconf("SC_CLK_TCK")


def _ticks() -> int:
    total = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if path.parent.name != str(os.getpid()):
            total += int(fields[11]) + int(fields[12])
    return total


def sent_bytes(interface: str = "lo") -> int:
    """Returns the bytes that an interface has sent so far, headers included."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == interface:
            return int(rest.split()[8])
    raise ValueError(f"no such interface. interface={interface}")


def this_python(module: str, *arguments: str) -> list[str]:
    """Returns the command of a module with this interpreter."""
    return [sys.executable, "-B", "-m", module, *arguments]
