"""Fresh virtual environments, into which a test types what the quickstart says to type."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.machine import ROOT

QUICKSTART: Final = (ROOT / "docs/quickstart.md").read_text(encoding="utf-8")
_INSTALL_S: Final = 600
_LINES: Final = [line.partition("  #")[0].strip() for line in QUICKSTART.splitlines()]
(VENV_LINE,) = [line for line in _LINES if line.startswith("python3 -m venv")]
SERVE_LINE: Final = next(line for line in _LINES if line.startswith("skerry serve"))
LEARN_LINES: Final = [line for line in _LINES if line.startswith("skerry learn")]
BUILD_LINE: Final = "pip install build && python -m build"
INSTALL_LINE: Final = 'pip install "$(ls dist/skerry-*.whl)[torch]"'


class Environment:
    """A copy of the tree with a fresh virtual environment in it, and a shell that has activated it."""

    def __init__(self, folder: Path, python: Path) -> None:
        self.folder = folder
        path = folder / "bin"
        path.mkdir(parents=True)
        (path / "python3").symlink_to(python)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SKERRY_"))}
        self.variables = {
            **kept,
            "PATH": f"{path}:{os.environ['PATH']}",
            "PIP_RETRIES": "0",  # an index that is not reached is asked only once
            "PIP_NO_COMPILE": "0",  # means --no-compile (pip reads it backwards), as little of torch is imported
            "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),  # what the tree is tested with
        }
        self._activate = ""
        self.shell(VENV_LINE)
        self._activate = VENV_LINE.partition("&&")[2].strip() + " && "
        self.shell("pip install --upgrade 'pip>=25.1'")  # the one that Python brings may need twice the time

    def shell(self, line: str, timeout_s: float = _INSTALL_S) -> str:
        """Returns what a line prints, which must succeed."""
        done = subprocess.run(
            ["bash", "-euc", self._activate + line],
            cwd=self.folder, env=self.variables, capture_output=True, text=True, check=False, timeout=timeout_s,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
        return done.stdout

    @contextmanager
    def running(self, line: str) -> Iterator[None]:
        """Runs a line meanwhile; interrupts it at the end."""
        words = ["bash", "-euc", f"{self._activate} exec {line}"]
        log = (self.folder / "log").open("a", encoding="utf-8")
        with log, subprocess.Popen(words, cwd=self.folder, env=self.variables, stdout=log, stderr=log) as process:
            try:
                yield
            finally:
                process.send_signal(signal.SIGINT)
                process.wait(60)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `dist` that a build makes, from a copy of the files that git has or would have."""
    tree = tmp_path_factory.mktemp("built") / "skerry"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tree / name)
    Environment(tree, Path(sys.executable).resolve()).shell(BUILD_LINE)
    return tree / "dist"


@pytest.fixture(scope="session")
def built_with_torch(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `built`; skips the test where pip would download gigabytes for GPUs that are not there."""
    if not shutil.which("nvidia-smi"):
        environment = Environment(tmp_path_factory.mktemp("torch"), Path(sys.executable).resolve())
        shutil.copytree(built, environment.folder / "dist")
        report = json.loads(environment.shell(INSTALL_LINE + " --quiet --dry-run --report -"))
        names = [package["metadata"]["name"] for package in report["install"]]
        if any(name.startswith("nvidia-") for name in names):
            pytest.skip("no build of PyTorch for CPUs was reached for this Python, and those for GPUs take gigabytes")
    return built


@contextmanager
def served(environment: Environment) -> Iterator[None]:
    """Runs the quickstart's syncer on a free port, which the environment's commands then use."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment.variables |= {"SKERRY_LISTEN": address, "SKERRY_TARGET": address}
    with environment.running(SERVE_LINE):
        yield


def newest(environment: Environment, run: str) -> int:
    """Returns the newest version of any fragment; 0 while there is none."""
    done = environment.shell(f"skerry runs show {run} --json || true", timeout_s=120)
    return max((version["version"] for version in json.loads(done)["run"]["versions"]), default=0) if done else 0
