"""The release workflow has the form that GitHub takes, and calls the commands that `make` has."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[3]
WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"
JOBS: dict[str, Any] = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"]


def commands(job: str) -> str:
    """Returns all that a job runs."""
    return "\n".join(step["run"] for step in JOBS[job]["steps"] if "run" in step)


def test_the_workflow_has_the_form_that_github_takes() -> None:
    words = ("-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", WORKFLOW)
    done = subprocess.run((sys.executable, *words), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_published_was_built_and_tested_by_the_commands_of_the_dry_run() -> None:
    assert commands("build") == "make release-dry-run"
    assert commands("install") == "make test-dist PYTHON=python"
    parts = re.findall(r"^release-dry-run: ([a-z -]*)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert [part.split() for part in parts] == [["dist", "test-dist"]]


def test_nothing_is_published_before_it_was_installed_nor_when_the_workflow_is_started_by_hand() -> None:
    for job in ("attest", "publish", "images"):
        assert "github.event_name == 'push'" in JOBS[job]["if"]
        before, left = set[str](), [job]
        while left:
            needed = JOBS[left.pop()].get("needs", [])
            left += [needed] if isinstance(needed, str) else needed
            before |= set(left)
        assert {"build", "install"} <= before


def test_only_the_jobs_that_sign_or_publish_get_an_identity() -> None:
    assert yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["permissions"] == {}
    assert {job for job, content in JOBS.items() if "id-token" in content["permissions"]} == {
        "attest",
        "publish",
        "images",
    }


def test_the_wheel_names_the_pythons_that_the_workflow_installs_it_on() -> None:
    named = re.findall(r":: Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert named == JOBS["install"]["strategy"]["matrix"]["python"]
    assert JOBS["build"]["steps"][1]["with"]["python-version"] == named[0]


def test_every_image_of_the_workflow_is_a_target_of_the_dockerfile() -> None:
    targets = re.findall(r"^FROM runtime AS (\w+)", (ROOT / "docker/Dockerfile").read_text("utf-8"), re.MULTILINE)
    assert sorted(JOBS["images"]["strategy"]["matrix"]["target"]) == sorted(targets)
