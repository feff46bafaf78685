"""What this machine lets a test do: its programs, packages and patience. What it does not, is a skip that says why."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeVar

import pytest

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "e2e"

# Debian's own first: another docker that lies before it on the path may lack what Debian's brings.
SYSTEM_PATH = "/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/bin"

# Where it is, no package's server is started when the package is installed: the tests start what they need themselves.
_POLICY = Path("/usr/sbin/policy-rc.d")

# Processes that run tests beside each other share the machine, so each gives up after this many times as long.
_SHARING = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))

T = TypeVar("T")


class CommandError(AssertionError):
    """A program ended with a status that the test didn't want; the message holds the end of what it said."""


class Namespace:
    """A command with processes and mounts of its own, which all end with it, and it with this process."""

    def __init__(self, *command: str, output: int | IO[bytes] = subprocess.DEVNULL) -> None:
        """`command` may begin with further options of `unshare`."""
        # With its own /proc: Ceph's gateway names its threads there, and gives up where it can't.
        unshare = ("unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child=KILL")
        self.process = subprocess.Popen(
            ["setpriv", "--pdeathsig=KILL", *unshare, *command],
            env={**os.environ, "PATH": SYSTEM_PATH},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def inside(self, *command: str) -> tuple[str, ...]:
        """Returns what runs a command beside this one."""
        return ("nsenter", "--target", self._first(), "--pid", "--mount", "--", *command)

    def _first(self) -> str:
        """Returns the number that the command's process has here."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return wait_until(lambda: path.read_text(encoding="ascii").strip(), what="the command runs", timeout_s=10)

    def end(self) -> None:
        """Kills all of it, and returns when its mounts are gone too."""
        first = None if self.process.poll() is not None else self._first()
        self.process.kill()
        self.process.wait(timeout=30)
        wait_until(lambda: not Path(f"/proc/{first}").exists(), what="the command ends", timeout_s=30)


def run(command: Sequence[str | Path], *, timeout_s: float, env: Mapping[str, str] | None = None) -> str:
    """Returns what a program printed.

    Raises:
        CommandError: it ended with another status than 0, or took longer than `timeout_s`.
    """
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words,
            env={**os.environ, "PATH": SYSTEM_PATH, **(env or {})},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        tail_text = _tail_of((error.stdout or b"") + (error.stderr or b""))
        raise CommandError(f"{' '.join(words)}: not done after {timeout_s:.0f} s\n{tail_text}") from None
    if done.returncode != 0:
        raise CommandError(f"{' '.join(words)}: status {done.returncode}\n{_tail_of(done.stdout + done.stderr)}")
    return done.stdout


def wait_until(condition: Callable[[], T | None], *, what: str, timeout_s: float, every_s: float = 0.5) -> T:
    """Returns the first answer of `condition` that counts as true, asked again and again.

    Raises:
        AssertionError: there was none within `timeout_s`, times the processes that share the machine.
    """
    timeout_s *= _SHARING
    deadline = time.monotonic() + timeout_s
    while True:
        if answer := condition():
            return answer
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s in vain: {what}"
        time.sleep(every_s)


def need_root() -> None:
    """Skips the test where it may not change this machine."""
    if os.geteuid() != 0:
        pytest.skip("not root: containers and Debian's servers can't be installed or started")


def need_programs(packages: Mapping[str, str]) -> None:
    """Installs the Debian packages of programs that are missing, or skips the test; `packages`: program to package."""
    with installing():  # what another process is about to install is not whole yet
        if not _missing(packages):
            return
    if os.geteuid() != 0:
        pytest.skip(f"not root, so install it yourself: apt install {' '.join(_missing(packages))}")
    if find("apt-get") is None:
        pytest.skip(f"no apt-get here to install {' '.join(_missing(packages))}")
    with installing():
        names = _missing(packages)
        if not names:
            return  # another process has installed them meanwhile
        try:
            with _no_started_servers():
                apt_get("update", timeout_s=120)
                apt_get("install", "--no-install-recommends", *names, timeout_s=400)
        except CommandError as error:
            pytest.skip(f"apt-get can't install {' '.join(names)}: {error}")
    still = [program for program in packages if find(program) is None]
    assert not still, f"installed {names}, and yet there is no {still}"


def _missing(packages: Mapping[str, str]) -> list[str]:
    """Returns the packages of the programs that are not here."""
    return sorted({package for program, package in packages.items() if find(program) is None})


def apt_get(*words: str, timeout_s: float) -> None:
    """Runs apt-get, which asks nothing and waits for another one to finish."""
    run(
        ["apt-get", "--quiet", "--yes", "--option", "DPkg::Lock::Timeout=120", *words],
        timeout_s=timeout_s,
        env={"DEBIAN_FRONTEND": "noninteractive"},
    )


def find(program: str) -> str | None:
    """Returns the path of a program of the system, not of the virtual environment."""
    return shutil.which(program, path=SYSTEM_PATH)


def tail(path: Path, *, lines: int = 40) -> str:
    """Returns the end of a log, under its name."""
    text = path.read_text(errors="replace") if path.exists() else "(not written)"
    return f"--- {path.name}\n{_tail_of(text, lines)}"


def _tail_of(text: str | bytes, lines: int = 40) -> str:
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    return "\n".join(text.strip().splitlines()[-lines:])


@contextmanager
def installing() -> Iterator[None]:
    """Waits until no other process of the tests installs: apt-get waits for another's installation, not its update."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "apt.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _no_started_servers() -> Iterator[None]:
    if _POLICY.exists():
        yield
        return
    _POLICY.write_text("#!/bin/sh\nexit 101\n", encoding="utf-8")
    _POLICY.chmod(0o755)
    try:
        yield
    finally:
        _POLICY.unlink(missing_ok=True)
