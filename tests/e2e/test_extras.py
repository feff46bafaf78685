"""Every extra of the wheel, and nothing else, is enough for the programs that it is for.

One environment gets the wheel with all extras from pip. For each extra a fresh one then gets the files of the packages
that pip would have installed for it, as links, so that a package of another extra is not there by luck.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import tomllib
import venv
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection
from importlib.metadata import Distribution, distributions
from itertools import chain
from pathlib import Path
from typing import Final

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.e2e.fresh import INSTALL_LINE, Environment, newest, served
from tests.e2e.machine import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

EXTRAS: Final = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
_EXAMPLE_S: Final = 120
_STEPS: Final = "48"  # two deltas of each fragment

# By extra: the examples that docs/training-loops.md installs it for, with the run that each makes.
EXAMPLES: Final = {
    "torch": {"plain": "plain"},
    "transformers": {"huggingface": "huggingface", "accelerate_loop": "accelerate"},
    "lightning": {"lightning_trainer": "lightning"},
    "peft": {"lora": "lora"},
    "jax": {"jax_optax": "jax"},
}
# What the page says to install beside the extra.
BESIDE: Final = {"jax": ["optax"]}


@pytest.fixture(scope="module")
def everything(built_with_torch: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    """An environment with the wheel, all of its extras and a syncer that runs."""
    folder = tmp_path_factory.mktemp("extras") / "skerry"
    environment = Environment(folder, Path(sys.executable).resolve())
    shutil.copytree(built_with_torch, folder / "dist", ignore=shutil.ignore_patterns("*.tar.gz"))
    shutil.copytree(ROOT / "examples", folder / "examples")
    beside = " ".join(chain.from_iterable(BESIDE.values()))
    environment.shell(f"{INSTALL_LINE.replace('[torch]', '[' + ','.join(EXTRAS) + ']')} {beside}")
    with served(environment):
        yield environment


@pytest.mark.parametrize("extra", EXAMPLES)
def test_an_extra_brings_all_that_its_programs_import(extra: str, everything: Environment, tmp_path: Path) -> None:
    python = only_with(extra, everything, tmp_path)
    for example, name in EXAMPLES[extra].items():
        words = ["us"] if example == "plain" else ["us", _STEPS, str(tmp_path / example)]
        run(python, str(everything.folder / "examples" / f"{example}.py"), *words, everything=everything)
        assert newest(everything, name) > 0


def test_the_extra_of_the_console_brings_all_that_it_imports(everything: Environment, tmp_path: Path) -> None:
    python = only_with("console", everything, tmp_path)
    words: list[str | Path] = [
        python,
        "-m",
        "skerry.cli",
        "console",
        "--listen",
        "127.0.0.1:0",
        "--port-file",
        tmp_path / "port",
    ]
    variables = everything.variables | {"SKERRY_HOST": "127.0.0.1 console.example"}
    with subprocess.Popen(words, env=variables, stderr=subprocess.PIPE, text=True) as console:
        try:
            assert page(console, tmp_path / "port", host="console.example") == 200
            assert page(console, tmp_path / "port", host="other.example") == 400
        finally:
            console.terminate()


def page(console: subprocess.Popen[str], port_file: Path, *, host: str) -> int:
    """Returns the status of the console's first page under a name."""
    while not port_file.exists():
        assert console.poll() is None, console.communicate()[1]
        time.sleep(0.1)
    connection = HTTPConnection("127.0.0.1", int(port_file.read_text()), timeout=60)
    connection.request("GET", "/", headers={"Host": host})
    return connection.getresponse().status


def only_with(extra: str, everything: Environment, folder: Path) -> Path:
    """Returns the interpreter of an environment with the packages of the wheel and of one extra."""
    venv.create(folder / "only", symlinks=True)
    source, wanted = (next(path.glob("lib/*/site-packages")) for path in (everything.folder / ".venv", folder / "only"))
    here: dict[str, Distribution] = {canonicalize_name(item.name): item for item in distributions(path=[str(source)])}
    for name in brought([f"skerry[{extra}]", *BESIDE.get(extra, [])], here):
        for file in here[name].files or []:
            if ".." not in file.parts and (source / file).is_file():  # else a command
                (wanted / file).parent.mkdir(parents=True, exist_ok=True)
                os.link(source / file, wanted / file)
    return folder / "only" / "bin" / "python"


def brought(lines: list[str], here: Mapping[str, Distribution]) -> set[str]:
    """Returns which of the packages here pip installs for these requirements."""
    known: set[tuple[str, str]] = set()
    left = [Requirement(line) for line in lines]
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras} - {extra for package, extra in known if package == name}:
            known.add((name, extra))
            needed = [Requirement(line) for line in here[name].requires or []]
            left += [need for need in needed if need.marker is None or need.marker.evaluate({"extra": extra})]
    return {name for name, _ in known}


def run(python: Path, *words: str, everything: Environment) -> None:
    """Runs a program to its end, which must succeed."""
    variables = everything.variables | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python, *words], cwd=python.parent, env=variables, capture_output=True, text=True, check=False,
        timeout=_EXAMPLE_S,
    )  # fmt: skip
    assert done.returncode == 0, f"{words}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
