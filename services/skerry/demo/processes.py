"""Child processes in groups of their own, each with its log, none of which outlives the demo."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

_LOG_TAIL_LINES: Final = 15
_END_TIMEOUT_S: Final = 10.0


class ChildError(Exception):
    """A child process ended as it shouldn't have; the message has the end of its log."""


class Child:
    """One process that was started, and whose end the demo decides."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log_path: Path) -> None:
        """Take over `process`, whose output goes to `log_path`."""
        self.name = name
        self.log_path = log_path
        self._process = process

    @property
    def is_running(self) -> bool:
        """It hasn't ended yet, by its own will or another's."""
        return self._process.poll() is None

    def kill(self) -> None:
        """SIGKILL for the process and all of its children: no handler runs, nothing is flushed."""
        self._signal(signal.SIGKILL)
        self._process.wait(_END_TIMEOUT_S)

    def ask_to_stop(self) -> None:
        """SIGTERM, without waiting for the effect."""
        self._signal(signal.SIGTERM)

    def expect_success(self, timeout_s: float) -> None:
        """Wait until it ends.

        Raises:
            ChildError: it ended with another status than 0, or not within `timeout_s`.
        """
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            message = f"{self.name} didn't end within {timeout_s:.0f} s. log={self.log_path}\n{self.log_tail()}"
            raise ChildError(message) from None
        if status != 0:
            message = f"{self.name} ended with status {status}. log={self.log_path}\n{self.log_tail()}"
            raise ChildError(message)

    def log_tail(self) -> str:
        """The last lines that it wrote."""
        text = self.log_path.read_text(errors="replace") if self.log_path.exists() else ""
        return "\n".join(text.splitlines()[-_LOG_TAIL_LINES:])

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)


class Nursery:
    """Starts `skerry` commands as children and ends whatever is left of them when it is left itself."""

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        """Run children in `directory`, with logs in its `logs`, and give every child `environment`.

        They must not run where the caller does, whose `skerry.toml` is meant for other runs than the demo's.
        """
        self._directory = directory
        self._log_directory = directory / "logs"
        self._environment = dict(environment)
        self._children: list[Child] = []

    def start(self, name: str, arguments: Sequence[str]) -> Child:
        """`skerry ARGUMENTS` as a process; what it says is appended to the log called `name`."""
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

    def output(self, name: str, arguments: Sequence[str], *, accepted: Sequence[int] = (0,), timeout_s: float) -> str:
        """What `skerry ARGUMENTS` writes to its standard output.

        Raises:
            ChildError: it ended with a status that isn't accepted, or not within `timeout_s`.
        """
        try:
            finished = subprocess.run(
                [sys.executable, "-m", "skerry.cli.main", *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                env=self._environment,
                cwd=self._directory,
                timeout=timeout_s,
                check=False,
                text=True,
            )
        except subprocess.TimeoutExpired:
            message = f"{name} didn't end within {timeout_s:.0f} s"
            raise ChildError(message) from None
        if finished.returncode not in accepted:
            tail = "\n".join(finished.stderr.splitlines()[-_LOG_TAIL_LINES:])
            message = f"{name} ended with status {finished.returncode}\n{tail}"
            raise ChildError(message)
        return finished.stdout

    def __enter__(self) -> Self:
        """Enter the context."""
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Kill whatever still runs."""
        for child in self._children:
            child.kill()
