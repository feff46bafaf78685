"""Processes that a benchmark starts and talks to: `skerry serve`, and children that take and give lines of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.request import urlopen

import psutil

ROOT: Final = Path(__file__).parents[1]
_START_S: Final = 60.0
_END_S: Final = 20.0
_LONGEST_S: Final = 600.0
_TAIL: Final = 2000
_CALLS: Final = 'skerry_store_call_duration_seconds_count{{operation="{}"}}'
# CPU times of other processes come in ticks of 10 ms; a process that took nearly none for so long is idle.
_IDLE_S: Final = 0.4
_IDLE_SHARE: Final = 0.1


class Process:
    """A process that answers commands; what it writes to stderr goes to a log."""

    def __init__(self, command: Sequence[str], log: Path, *, node: str = "") -> None:
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
                env=environment(),
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

    def hear(self, timeout_s: float = _LONGEST_S) -> Any:
        """Returns the next answer.

        Raises:
            RuntimeError: the process has ended; the message has the end of its log.
            TimeoutError: it did not answer in time.
        """
        return json.loads(self.read_line(timeout_s))

    def read_line(self, timeout_s: float) -> bytes:
        """Returns the next line of its output; raises as `hear` does."""
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
        return line

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


class Served(Process):
    """A `skerry serve` process with a new durable store in a folder."""

    def __init__(self, folder: Path, *options: str, listen: str = "127.0.0.1:0", node: str = "") -> None:
        """Returns when it listens; raises as `hear` does."""
        self.store = folder / "store"
        store_options = ["--new-store", "--store", self.store.as_uri(), "--scratch", str(folder / "scratch")]
        listen_options = ["--listen", listen, "--metrics", "127.0.0.1:0", "--log-level", "warning"]
        command = this_python("skerry.cli", "serve", *listen_options, *store_options, *options)
        super().__init__(command, folder / "serve.log", node=node)
        self.target = self.read_line(_START_S).split()[2].rstrip(b",").decode()
        self._metrics_url = self.read_line(_START_S).split()[2].decode()

    def cpu_s(self) -> float:
        """Returns the seconds of CPU that the process took so far, in ticks of 10 ms."""
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)

    def waited_s(self) -> float:
        """Returns the seconds for which the thread of the event loop, the first, was ready and had no core so far."""
        return int(Path(f"/proc/{self.pid}/task/{self.pid}/schedstat").read_text().split()[1]) / 1e9

    def peak_bytes(self) -> int:
        """Returns the largest resident size so far, resident pages of scratch files included."""
        return status_bytes(self.pid, "VmHWM")

    def resident_bytes(self) -> int:
        """Returns the resident size."""
        return status_bytes(self.pid, "VmRSS")

    def wait_idle(self, timeout_s: float = 60.0) -> None:
        """Returns when the process has nearly stopped working: snapshots and adoption go on after a commit."""
        wait_idle(timeout_s, self.cpu_s)

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

    def store_use(self) -> dict[str, float]:
        """Returns what the store has taken since the start: requests by kind, versions, and bytes of the run's log."""
        metrics = self.metrics()
        return {
            "requests that write": sum(metrics.get(_CALLS.format(one), 0.0) for one in ("create", "write", "list")),
            "requests that read": sum(metrics.get(_CALLS.format(one), 0.0) for one in ("get", "stream")),
            "bytes of the log": sum(path.stat().st_size for path in self.store.glob("runs/*/*/log/*")),
            "versions": self.total("skerry_versions_total"),
        }


@contextlib.contextmanager
def served(folder: Path) -> Iterator[Served]:
    """Yields a syncer on loopback; it is killed at the end."""
    syncer = Served(folder)
    try:
        yield syncer
    finally:
        syncer.end()


@contextlib.contextmanager
def children(module: str, arguments: Sequence[Sequence[str]], folder: Path) -> Iterator[list[Process]]:
    """Yields one process of a module for each list of arguments; they are killed at the end."""
    started: list[Process] = []
    try:
        for number, own in enumerate(arguments):
            started.append(Process(this_python(module, *own), folder / f"{module}-{number}.log"))
        yield started
    finally:
        for child in started:
            child.end()


def all_hear(processes: Sequence[Process], timeout_s: float = _LONGEST_S, **command: Any) -> list[Any]:
    """Tells all the same, and returns their answers."""
    for process in processes:
        process.tell(**command)
    return [process.hear(timeout_s) for process in processes]


def this_python(module: str, *arguments: str) -> list[str]:
    """Returns the command of a module with this interpreter."""
    return [sys.executable, "-B", "-m", module, *arguments]


def environment() -> dict[str, str]:
    """Returns this process's environment, with one thread a library, and this project's packages on the path."""
    path = [str(ROOT), *(entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry)]
    resolved = os.pathsep.join(str((ROOT / entry).resolve()) for entry in path)
    return {**os.environ, "PYTHONPATH": resolved, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def others_cpu_s() -> float:
    """Returns the CPU seconds that living processes of this pid namespace took so far, without this one."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = path.read_text().rpartition(")")[2].split()
            if path.parent.name != str(os.getpid()):
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def wait_idle(timeout_s: float, cpu_s: Callable[[], float] = others_cpu_s) -> None:
    """Returns when what takes `cpu_s` has nearly stopped working, or after a time."""
    deadline_s = time.monotonic() + timeout_s
    before = cpu_s()
    while time.monotonic() < deadline_s:
        time.sleep(_IDLE_S)
        now = cpu_s()
        if now - before <= _IDLE_SHARE * _IDLE_S:
            return
        before = now


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
