"""A run's life from the command line, against the real syncer in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.unit.cli.serving import serving


@pytest.fixture
def target(tmp_path: Path) -> Iterator[str]:
    """The address of `skerry serve` on an empty store."""
    with serving(tmp_path) as address:
        yield address


def test_a_run_is_created_steered_rolled_back_closed_and_deleted(target: str, tmp_path: Path) -> None:
    def skerry(*words: str, status: int = 0) -> str:
        command = [sys.executable, "-m", "skerry.cli", *words, "--target", target]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout

    weights = {"embedding": np.ones((64, 8), np.float32), "head": np.zeros(8, np.float32)}
    save_file(weights, tmp_path / "initial.safetensors")
    created = json.loads(
        skerry("runs", "create", "demo", "--weights", "initial.safetensors", "--set", "quorum_count=2", "--json")
    )
    assert (created["status"], created["parameter_count"]) == ("open", 520)
    assert [run["uid"] for run in json.loads(skerry("runs", "list", "--json"))] == [created["uid"]]
    skerry("runs", "create", "demo", "--weights", "initial.safetensors", status=3)

    policy = json.loads(skerry("runs", "policy", "demo", "--set", "outer.learning_rate=0.4", "--json"))
    assert (policy["quorum_count"], policy["outer"]["learning_rate"], policy["outer"]["momentum"]) == (2, 0.4, 0.8)

    rolled = json.loads(skerry("rollback", "demo", "--to", str(created["position"]), "--json"))
    assert {version["version"] for version in rolled["versions"]} == {1}
    assert [version["digest"] for version in rolled["versions"]] == [
        version["digest"] for version in created["versions"]
    ], "the content is that of version 0"

    assert json.loads(skerry("runs", "close", "demo", "--json"))["status"] == "closed"
    events = [json.loads(line) for line in skerry("watch", "demo", "--json", "--after", "1").splitlines()]
    assert "start" in events[0]
    assert any("rolled_back" in line["event"] for line in events[1:])
    assert events[-1]["event"]["status_changed"] == "closed"

    skerry("runs", "delete", "demo", "--yes")
    assert json.loads(skerry("runs", "list", "--json")) == []
