"""The systems that are measured, and the environment that each is installed in."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ENVIRONMENTS: Final = Path(__file__).parents[2] / "build" / "rivals"
_TORCH: Final = "torch==2.13.0"
_STAMP: Final = "installed.txt"
_INSTALL_S: Final = 1800.0


@dataclass(frozen=True)
class Contender:
    """A system: its module in `peers`, what it needs, and the versions of Python for which that is published.

    A system that polls is never idle, so its bytes and CPU are counted up to the end of each synchronisation only.
    """

    name: str
    title: str
    requirements: tuple[str, ...] = ()  # none: it runs in this project's environment
    pythons: tuple[str, ...] = ("3.11", "3.12", "3.13")
    is_polling: bool = False

    @property
    def module(self) -> str:
        """The module of one of its processes."""
        return f"benchmarks.rivals.peers.{self.name}"


CONTENDERS: Final = (
    Contender("skerry", "Skerry, 4 bits both ways"),
    Contender("torchft", "torchft DiLoCo, float32", (_TORCH, "torchft==0.2.0", "numpy")),
    # With NumPy 2.4 its 8 bits report success and average nothing.
    Contender("hivemind", "hivemind averager, 8 bits", (_TORCH, "hivemind==1.1.12", "numpy<2.4", "setuptools<81")),
    Contender(
        "gradientmail",
        "GradientMail, 4 bits both ways",
        (_TORCH, "gradientmail[s3]==0.0.2", "moto[s3,server]==5.2.5", "numpy"),
        pythons=("3.12", "3.13"),
        is_polling=True,
    ),
    Contender("allreduce", "all-reduce of gradients, float32"),
)


class UnavailableError(Exception):
    """A system can't be installed here; the message says why."""


def python_of(contender: Contender, say: Callable[[str], None]) -> str:
    """Returns the interpreter of a contender's environment, which is made if it is not there yet.

    Raises:
        UnavailableError: there is no such Python, or pip can't install the packages.
    """
    if not contender.requirements:
        return sys.executable
    folder = ENVIRONMENTS / contender.name
    python, stamp = folder / "bin" / "python", folder / _STAMP
    wanted = "\n".join(contender.requirements)
    if stamp.exists() and stamp.read_text() == wanted:
        return str(python)
    say(f"{contender.name}: installing into {folder} (minutes, torch is large)")
    shutil.rmtree(folder, ignore_errors=True)
    _run([_interpreter(contender), "-m", "venv", str(folder)])
    _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *contender.requirements])
    stamp.write_text(wanted)
    return str(python)


def _interpreter(contender: Contender) -> str:
    """Returns a Python of a version that the contender's packages support."""
    for version in contender.pythons:
        found = map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
        for candidate in (sys.executable, shutil.which(f"python{version}"), *sorted(found)):
            if candidate is not None and _version(candidate) == version:
                return candidate
    raise UnavailableError(f"it needs Python {' or '.join(contender.pythons)}, which is not installed")


def _version(python: str) -> str:
    show = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run([python, "-c", show], check=False, capture_output=True, text=True).stdout.strip()


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_INSTALL_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"it could not be installed. cause={error}") from error
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UnavailableError(f"it could not be installed. reason={reason}")
