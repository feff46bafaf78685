"""Child processes of the demo: each in a process group of its own, with a log, and killed when the demo ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Self

_LOG_TAIL_LINES: Final = 15
_END_TIMEOUT_S: Final = 10.0
_OUTPUT_TIMEOUT_S: Final = 120.0


class ChildError(Exception):
    """A child process failed, ended too early or did not end in time; the message has the end of its log."""


class Child:
    """One process that was started."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log_path: Path) -> None:
        """Wrap `process`, whose output goes to `log_path`."""
        self.name = name
        self.log_path = log_path
        self._process = process

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Send SIGKILL to the process and its children, and wait for the end."""
        self._signal(signal.SIGKILL)
        self._process.wait(_END_TIMEOUT_S)

    def ask_to_stop(self) -> None:
        """Send SIGTERM, and do not wait for the end."""
        self._signal(signal.SIGTERM)

    def expect_success(self, timeout_s: float) -> None:
        """Wait until it ends.

        Raises:
            ChildError: it ended with another status than 0, or not within `timeout_s`.
        """
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ChildError(
                f"{self.name} did not end within {timeout_s:.0f} s. log={self.log_path}\n{self.log_tail()}"
            ) from None
        if status != 0:
            raise ChildError(f"{self.name} ended with status {status}. log={self.log_path}\n{self.log_tail()}")

    def log_tail(self) -> str:
        """The last lines of its log."""
        text = self.log_path.read_text(errors="replace") if self.log_path.exists() else ""
        return "\n".join(text.splitlines()[-_LOG_TAIL_LINES:])

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)


class Nursery:
    """Starts `skerry` commands as child processes; leaving its context kills those that still run."""

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        """Run every child in `directory` with `environment`; logs go to its subdirectory `logs`.

        The caller's own working directory may have a `skerry.toml` that is meant for another run.
        """
        self._directory = directory
        self._log_directory = directory / "logs"
        self._environment = dict(environment)
        self._children: list[Child] = []

    def start(self, name: str, arguments: Sequence[str]) -> Child:
        """Start `skerry ARGUMENTS`; its output is appended to the log `name`."""
        self._log_directory.mkdir(parents=True, exist_ok=True)
        log_path = self._log_directory / f"{name}.log"
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "skerry.cli.main", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                cwd=self._directory,
                start_new_session=True,
            )
        child = Child(name, process, log_path)
        self._children.append(child)
        return child

    def output(self, name: str, arguments: Sequence[str], *, accepted: Sequence[int] = (0,)) -> str:
        """Run `skerry ARGUMENTS` and return its standard output.

        Raises:
            ChildError: its exit status is not accepted, or it did not end in time.
        """
        try:
            finished = subprocess.run(
                [sys.executable, "-m", "skerry.cli.main", *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                env=self._environment,
                cwd=self._directory,
                timeout=_OUTPUT_TIMEOUT_S,
                check=False,
                text=True,
            )
        except subprocess.TimeoutExpired:
            raise ChildError(f"{name} did not end within {_OUTPUT_TIMEOUT_S:.0f} s") from None
        if finished.returncode not in accepted:
            tail = "\n".join(finished.stderr.splitlines()[-_LOG_TAIL_LINES:])
            raise ChildError(f"{name} ended with status {finished.returncode}\n{tail}")
        return finished.stdout

    def __enter__(self) -> Self:
        """Enter the context."""
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the children that still run."""
        for child in self._children:
            child.kill()
