"""What the README says to type, typed in fresh environments: from the wheel and the sdist, on every Python here."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.machine import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SUPPORTED: Final = ("3.11", "3.12", "3.13", "3.14")
README: Final = (ROOT / "README.md").read_text(encoding="utf-8")
# All together take half an hour, most of which is PyTorch's installation.
_EVERY: Final = "SKERRY_EVERY_INSTALL" in os.environ
_NOT_ALL: Final = "SKERRY_EVERY_INSTALL=1 tries all Pythons that are here, and PyTorch from the sdist too"
_INSTALL_S: Final = 600
_FIRST_VERSION_S: Final = 300


def readme_lines(heading: str) -> list[str]:
    """Returns the shell lines below a heading, up to the next heading."""
    section = README.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```sh\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    lines = [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if not line.startswith("#")]


_CLONE, VENV_LINE, BUILD_LINE, GPU_LINE, CPU_LINE = readme_lines("Install")
SERVE_LINE, *LEARN_LINES = readme_lines("Three terminals")[:3]


def interpreter(version: str) -> Path:
    """Returns the Python of this version, or skips the test."""
    is_own = version == f"{sys.version_info[0]}.{sys.version_info[1]}"
    if not is_own and not _EVERY:
        pytest.skip(_NOT_ALL)
    places = [Path(sys.executable)] if is_own else []
    places += [Path(found)] if (found := shutil.which(f"python{version}")) else []
    places += sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for place in places:
        if place.exists():
            return place.resolve()
    pytest.skip(f"Python {version} is not on this machine")


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
            "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),  # what the tree is tested with
        }
        self._activate = ""
        self.shell(VENV_LINE)
        self._activate = VENV_LINE.partition("&&")[2].strip() + " && "

    def shell(self, line: str, timeout_s: float = _INSTALL_S) -> str:
        """Returns what a line prints, which must succeed."""
        done = subprocess.run(
            ["bash", "-euc", self._activate + line],
            cwd=self.folder, env=self.variables, capture_output=True, text=True, check=False, timeout=timeout_s,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
        return done.stdout

    def install_line(self, line: str) -> str:
        """Returns the README's line, which names the wheel, for what is in `dist`."""
        assert "*.whl" in line
        return line if any(self.folder.glob("dist/*.whl")) else line.replace("*.whl", "*.tar.gz")

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


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `dist` that the README's line makes, from a copy of the files that git has or would have."""
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


@pytest.fixture(params=SUPPORTED)
def python(request: pytest.FixtureRequest) -> Path:
    return interpreter(request.param)


@pytest.fixture(params=["*.whl", "*.tar.gz"], ids=["wheel", "sdist"])
def environment(request: pytest.FixtureRequest, built: Path, python: Path, tmp_path: Path) -> Environment:
    """A fresh environment beside which `dist` has only a wheel, or only an sdist."""
    found = Environment(tmp_path / "skerry", python)
    (tmp_path / "skerry" / "dist").mkdir()
    (only,) = built.glob(request.param)
    shutil.copyfile(only, tmp_path / "skerry" / "dist" / only.name)
    return found


def test_a_learner_of_arrays_needs_no_torch(environment: Environment) -> None:
    environment.shell(environment.install_line(GPU_LINE).replace("[torch]", ""))
    assert "torch" not in environment.shell("pip list --format freeze")
    with served(environment):
        shutil.copytree(ROOT / "examples", environment.folder / "examples")
        environment.shell("python examples/arrays.py us", timeout_s=120)
        assert newest(environment, "arrays") > 0


def test_from_pip_install_to_the_first_merged_version(
    environment: Environment, capsys: pytest.CaptureFixture[str]
) -> None:
    # Each line once on each Python: they differ in where torch is from, not in what is built.
    is_wheel = any(environment.folder.glob("dist/*.whl"))
    if not is_wheel and not _EVERY:
        pytest.skip(_NOT_ALL)
    line = environment.install_line(CPU_LINE if is_wheel else GPU_LINE)
    need_small_torch(environment, line)
    begun_s = time.monotonic()
    environment.shell(line)
    installed_s = time.monotonic()
    with served(environment), ExitStack() as learners:
        for learn in LEARN_LINES:
            learners.enter_context(environment.running(learn))
        while not newest(environment, "python"):
            assert time.monotonic() < installed_s + _FIRST_VERSION_S, (environment.folder / "log").read_text("utf-8")
            time.sleep(0.5)
        merged_s = time.monotonic()
    with capsys.disabled():
        print(f"\npip install {installed_s - begun_s:.0f} s, first merged version {merged_s - installed_s:.0f} s later")


def need_small_torch(environment: Environment, line: str) -> None:
    """Skips the test where pip would download gigabytes for GPUs that are not there."""
    if shutil.which("nvidia-smi"):
        return
    report = json.loads(environment.shell(line + " --quiet --dry-run --report -"))
    names = [found["metadata"]["name"] for found in report["install"]]
    if any(name.startswith("nvidia-") for name in names):
        pytest.skip("no build of PyTorch for CPUs was reached for this Python, and those for GPUs take gigabytes")


@contextmanager
def served(environment: Environment) -> Iterator[None]:
    """Runs the README's syncer on a free port, which the environment's commands then use."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment.variables |= {"SKERRY_LISTEN": address, "SKERRY_TARGET": address}
    with environment.running(SERVE_LINE):
        yield


def newest(environment: Environment, run: str) -> int:
    """Returns the newest version of any fragment; 0 while there is none."""
    done = environment.shell(f"skerry runs show {run} --json || true", timeout_s=120)
    return max((version["version"] for version in json.loads(done)["run"]["versions"]), default=0) if done else 0
