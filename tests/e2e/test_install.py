"""What the quickstart says to type, typed in fresh environments, from the wheel that a build makes of the sdist."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.fresh import INSTALL_LINE, LEARN_LINES, Environment, newest, served
from tests.e2e.machine import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

VERSIONS: Final = re.findall(r":: Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
_FIRST_VERSION_S: Final = 300


@pytest.fixture
def environment(built_with_torch: Path, tmp_path: Path) -> Environment:
    """A fresh environment beside `dist`."""
    environment = Environment(tmp_path / "skerry", Path(sys.executable).resolve())
    shutil.copytree(built_with_torch, tmp_path / "skerry" / "dist")
    return environment


@pytest.mark.parametrize("version", VERSIONS)
def test_the_wheel_can_be_imported_and_trains_on_each_python_that_it_names(
    version: str, built: Path, tmp_path: Path
) -> None:
    (wheel,) = built.glob("skerry-*.whl")
    words = [python_of(version), ROOT / ".ci" / "try_wheel.py", wheel]
    variables = {**os.environ, "PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "PIP_RETRIES": "0"}
    done = subprocess.run(words, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Python {version}." in done.stdout


def python_of(version: str) -> Path:
    """Returns a Python of this version that can make environments, or skips the test."""
    folders = [Path(sys.executable).parent, *Path.home().glob(f".pyenv/versions/{version}.*/bin"), Path("/usr/bin")]
    for program in (folder / f"python{version}" for folder in folders):
        if program.exists() and subprocess.run([program, "-c", "import ensurepip"], check=False).returncode == 0:
            return program.resolve()
    pytest.skip(f"Python {version} is not on this machine")


def test_from_pip_install_to_the_first_merged_version(environment: Environment) -> None:
    environment.shell(INSTALL_LINE)
    with served(environment), ExitStack() as learners:
        for learn in LEARN_LINES:
            learners.enter_context(environment.running(learn))
        end_s = time.monotonic() + _FIRST_VERSION_S
        while not newest(environment, "python"):
            assert time.monotonic() < end_s, (environment.folder / "log").read_text("utf-8")
            time.sleep(0.5)
