"""Child processes: a real `skerry serve`, its CPU time, its memory and its metrics; others by module name."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.request import urlopen

import psutil

_START_S: Final = 60.0
_END_S: Final = 20.0
# CPU times of other processes come in ticks of 10 ms; a process that took none for so long is idle.
_IDLE_S: Final = 0.4
_IDLE_SHARE: Final = 0.05


class Served:
    """A `skerry serve` process on loopback with its store in a folder."""

    def __init__(self, process: subprocess.Popen[bytes], target: str, metrics_url: str, store: Path) -> None:
        self.target = target
        self.store = store
        self._metrics_url = metrics_url
        self._process = psutil.Process(process.pid)

    def cpu_s(self) -> float:
        """Returns the seconds of CPU that the process took so far, in ticks of 10 ms."""
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def waited_s(self) -> float:
        """Returns the seconds for which the thread of the event loop, the first, was ready and had no core so far."""
        pid = self._process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e9

    def peak_bytes(self) -> int:
        """Returns the largest resident size since `forget_peak`, resident pages of scratch files included."""
        return status_bytes(self._process.pid, "VmHWM")

    def resident_bytes(self) -> int:
        """Returns the resident size."""
        return status_bytes(self._process.pid, "VmRSS")

    def forget_peak(self) -> None:
        """Has `peak_bytes` start anew."""
        forget_peak(self._process.pid)

    def wait_idle(self, timeout_s: float = 60.0) -> None:
        """Returns when the process has nearly stopped working: snapshots and adoption go on after a commit."""
        deadline_s = time.monotonic() + timeout_s
        before = self.cpu_s()
        while time.monotonic() < deadline_s:
            time.sleep(_IDLE_S)
            now = self.cpu_s()
            if now - before <= _IDLE_SHARE * _IDLE_S:
                return
            before = now

    def store_bytes(self) -> int:
        """Returns the size of all files of the store."""
        return sum(path.stat().st_size for path in self.store.rglob("*") if path.is_file())

    def metrics(self) -> dict[str, float]:
        """Returns every sample of the metrics endpoint, by name with labels."""
        with urlopen(self._metrics_url, timeout=_START_S) as response:
            lines = response.read().decode().splitlines()
        samples = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    def total(self, name: str) -> float:
        """Returns the sum of a metric's samples over all its labels."""
        return sum(value for key, value in self.metrics().items() if key.partition("{")[0] == name)


@contextlib.contextmanager
def served(folder: Path, *options: str) -> Iterator[Served]:
    """Yields a syncer with a durable store in `folder`; it is killed at the end.

    Raises:
        RuntimeError: it did not start; the message has the end of its log.
    """
    store, log_path = folder / "store", folder / "serve.log"
    store_options = ["--new-store", "--store", store.as_uri(), "--scratch", str(folder / "scratch")]
    listen_options = ["--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--log-level", "warning"]
    command = [sys.executable, "-m", "skerry.cli.main", "serve", *listen_options, *store_options, *options]
    with log_path.open("ab") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, cwd=folder, env=environment())
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline().decode().split() for _ in range(2)]
        if not all(lines):
            raise RuntimeError(f"syncer did not start. log={log_path.read_text()[-2000:]}")
        yield Served(process, lines[0][2].rstrip(","), lines[1][2], store)
    finally:
        process.kill()
        process.wait(_END_S)


def environment() -> dict[str, str]:
    """Returns this process's environment with its import path, which children started elsewhere need."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}


class Child:
    """A module of this package as a process: it takes and gives lines of JSON."""

    def __init__(self, module: str, arguments: Sequence[str], log_path: Path) -> None:
        command = [sys.executable, "-m", f"benchmarks.speed.{module}", *arguments]
        self._log_path = log_path
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment()
            )

    def tell(self, **command: Any) -> None:
        """Sends a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        """Returns the next answer.

        Raises:
            RuntimeError: the process has ended; the message has the end of its log.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"child process ended. log={self._log_path.read_text()[-2000:]}")
        return json.loads(line)

    def end(self) -> None:
        """Kills the process if it still runs."""
        self._process.kill()
        self._process.wait(_END_S)


@contextlib.contextmanager
def children(module: str, arguments: Sequence[Sequence[str]], folder: Path) -> Iterator[list[Child]]:
    """Yields one process of the module for each list of arguments; they are killed at the end."""
    started: list[Child] = []
    try:
        for number, own in enumerate(arguments):
            started.append(Child(module, own, folder / f"{module}-{number}.log"))
        yield started
    finally:
        for child in started:
            child.end()


def commands() -> Iterator[dict[str, Any]]:
    """Yields, in a child, the commands that it is told."""
    for line in sys.stdin:
        yield json.loads(line)


def answer(**values: Any) -> None:
    """Answers, in a child, the process that started it."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def status_bytes(pid: int, field: str) -> int:
    """Returns a size from the kernel's account of a process; resident pages of mapped files count as all others.

    Raises:
        ValueError: the kernel does not tell.
    """
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise ValueError(f"kernel does not tell. field={field}")


def forget_peak(pid: int) -> None:
    """Has the kernel start a process's largest resident size anew (Linux only)."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
