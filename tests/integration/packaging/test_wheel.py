"""The wheel, not the tree: built, installed outside the tree, imported and run from there."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def run(*command: str | Path, folder: Path) -> str:
    """Returns what a program printed; its environment knows nothing of the tree."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SKERRY_"))}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built with the build backend that is installed here, so that nothing is fetched."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT, folder=folder)
    return next(folder.glob("skerry-*.whl"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment that has the wheel, and the dependencies of this one but not its tree."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False, symlinks=True)
    interpreter = folder / "bin" / "python"
    where = run(interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=folder)
    run(
        sys.executable, "-m", "pip", "--python", interpreter, "install", "--quiet", "--no-deps", "--no-index", wheel,
        folder=folder,
    )  # fmt: skip
    # A path line only adds a folder: the .pth of the editable installation that lies in it is not read.
    (Path(where.strip()) / "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    return interpreter


def test_the_wheel_has_what_a_stranger_needs(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    folders = (ROOT / "client", ROOT / "services")
    modules = {path.relative_to(folder).as_posix() for folder in folders for path in folder.glob("skerry*/**/*.py")}
    files = ("skerry/v1/exchange_pb2.pyi", "skerry/py.typed", "skerry/planning/figures.json")
    pages = ("skerry_console/templates/run.html", "skerry_console/static/console.js")
    assert {*modules, *files, *pages} <= set(names)
    packages = {"skerry", "skerry_syncer", "skerry_learner", "skerry_console"}
    assert {name.partition("/")[0].partition("-")[0] for name in names} == packages


def test_the_installed_wheel_is_imported_from_itself(python: Path, tmp_path: Path) -> None:
    where = run(python, "-c", "import skerry.wire; print(skerry.wire.__file__)", folder=tmp_path)
    assert Path(where.strip()).is_relative_to(python.parents[1])


def test_the_installed_command_shows_its_help(python: Path, tmp_path: Path) -> None:
    shown = run(python.with_name("skerry"), "--help", folder=tmp_path)
    for command in ("serve", "learn", "runs", "watch", "verify"):
        assert f"  {command} " in shown
    assert run(python, "-m", "skerry.cli", "--version", folder=tmp_path).startswith("skerry ")
