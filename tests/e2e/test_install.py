"""What the quickstart says to type, typed in fresh environments, from the wheel that a build makes of the sdist."""

from __future__ import annotations

import shutil
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.fresh import INSTALL_LINE, LEARN_LINES, Environment, need_small_torch, newest, served
from tests.e2e.machine import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

_FIRST_VERSION_S: Final = 300


@pytest.fixture
def environment(built: Path, tmp_path: Path) -> Environment:
    """A fresh environment beside `dist`."""
    environment = Environment(tmp_path / "skerry", Path(sys.executable).resolve())
    shutil.copytree(built, tmp_path / "skerry" / "dist")
    return environment


def test_a_learner_of_arrays_needs_no_torch(environment: Environment) -> None:
    environment.shell(INSTALL_LINE.replace("[torch]", ""))
    assert "torch" not in environment.shell("pip list --format freeze")
    with served(environment):
        shutil.copytree(ROOT / "examples", environment.folder / "examples")
        environment.shell("python examples/arrays.py us", timeout_s=120)
        assert newest(environment, "arrays") > 0


def test_from_pip_install_to_the_first_merged_version(environment: Environment) -> None:
    need_small_torch(environment, INSTALL_LINE)
    environment.shell(INSTALL_LINE)
    with served(environment), ExitStack() as learners:
        for learn in LEARN_LINES:
            learners.enter_context(environment.running(learn))
        end_s = time.monotonic() + _FIRST_VERSION_S
        while not newest(environment, "python"):
            assert time.monotonic() < end_s, (environment.folder / "log").read_text("utf-8")
            time.sleep(0.5)
