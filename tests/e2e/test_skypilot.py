"""deploy/skypilot: its tasks and its script are what SkyPilot's own parser takes, and say what the commands take."""

from __future__ import annotations

import json
import subprocess
import venv
from pathlib import Path
from typing import Any, Final

import pytest
from click.testing import CliRunner

from skerry.cli.main import cli, every_command
from tests.e2e.machine import BUILD, ROOT, CommandError, run
from tests.support.made_keys import make_keys

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

_FOLDER: Final = ROOT / "deploy/skypilot"
_VERSION: Final = "0.14.1"
_LEARNERS: Final = {"us-1": "aws/us-east-1", "eu-1": "gcp/europe-west4", "asia-1": "aws/ap-northeast-1"}


@pytest.fixture(scope="module")
def sky() -> Path:
    """The Python of an environment with SkyPilot, which has no place in ours; made once and kept in build/e2e."""
    folder = BUILD / f"skypilot-{_VERSION}"
    python = folder / "bin" / "python"
    stamp = folder / "ready"
    if not stamp.exists():
        venv.create(folder, with_pip=True, upgrade_deps=True, clear=True)
        try:
            run([python, "-m", "pip", "install", "--quiet", "--no-compile", f"skypilot=={_VERSION}"], timeout_s=900)
        except CommandError as error:
            pytest.skip(f"pip finds no SkyPilot: {error}")
        stamp.touch()
    return python


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder as the page has it: keys and a wheel."""
    words = [word for learner in _LEARNERS for word in ("--learner", f"gpt/{learner}")]
    make_keys(tmp_path / "keys", "--server", "syncer", *words)
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist/skerry-0.1.0-py3-none-any.whl").touch()
    return tmp_path


def parsed(command: list[str | Path], folder: Path, sky: Path) -> list[dict[str, Any]]:
    """Returns what `sky` parsed in each of its calls."""
    env = {"PATH": "/usr/bin:/bin", "HOME": str(folder / "home"), "SKY": f"{sky} {ROOT / 'tests/e2e/sky_parser.py'}"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def options_of(script: str) -> list[str]:
    """Returns the options of the command `skerry` in a task's script."""
    words = script.replace("\\\n", " ").split("bin/skerry ")[1].split()
    return [word for word in words if word.startswith("--")]


def test_the_syncer_is_a_cluster_that_stays_and_listens_for_learners(sky: Path, place: Path) -> None:
    words = ["launch", "--cluster", "skerry-syncer", "--env", "SKERRY_STORE=s3://bucket/skerry"]
    command: list[str | Path] = [sky, ROOT / "tests/e2e/sky_parser.py", *words, _FOLDER / "syncer.yaml"]
    (task,) = parsed(command, place, sky)
    assert (task["ports"], task["use_spot"]) == (["50051"], False)
    assert set(task["mounts"]) == {"~/dist", "~/keys/ca.pem", "~/keys/syncer.pem", "~/keys/syncer.key"}
    known = CliRunner().invoke(cli, ["serve", "--help"]).output
    assert all(option in known for option in options_of(task["run"]))


def test_three_learners_are_jobs_in_three_regions_each_with_its_own_key(sky: Path, place: Path) -> None:
    script: list[str | Path] = [_FOLDER / "learners.sh", "gpt", "syncer.example:50051", place / "keys", place / "dist"]
    tasks = parsed(script, place, sky)
    assert {task["envs"]["SKERRY_LEARNER_ID"]: task["infra"] for task in tasks} == _LEARNERS
    assert [task["envs"]["SKERRY_SHARD"] for task in tasks] == ["1/3", "2/3", "3/3"]
    for task in tasks:
        assert task["use_spot"]
        assert task["recovery"]["strategy"] == "EAGER_NEXT_REGION"
        assert not [source for source in task["mounts"].values() if source.endswith("ca.key")]
    assert set(tasks[0]["envs"]) <= {parameter.envvar for parameter in every_command()["learn"].params}


def test_a_task_without_its_store_is_refused(sky: Path, place: Path) -> None:
    command: list[str | Path] = [sky, ROOT / "tests/e2e/sky_parser.py", "launch", _FOLDER / "syncer.yaml"]
    with pytest.raises(AssertionError, match="SKERRY_STORE"):
        parsed(command, place, sky)
