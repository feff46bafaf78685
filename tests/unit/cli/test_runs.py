"""`skerry runs` and `skerry rollback` against a real syncer, as a person or a script runs them."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from skerry import ArrayLearner, RunsClient
from skerry.cli import failures
from skerry.cli.main import cli
from tests.support.quadratic import QUICK, Quadratic, train_until

Skerry = Callable[..., str]


@pytest.fixture
def skerry(target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Skerry:
    """Returns what runs a command against a fresh syncer, and returns what it prints if it ends with that status."""
    monkeypatch.setenv("SKERRY_TARGET", target)

    def run(*words: str, status: int = 0) -> str:
        capsys.readouterr()
        ended = failures.run(cli, list(words))
        shown = capsys.readouterr()
        assert ended == status, shown.out + shown.err
        return shown.err if status else shown.out

    return run


@pytest.fixture
def create(skerry: Skerry, tmp_path: Path) -> tuple[str, ...]:
    """The command that creates the run "demo"."""
    file = tmp_path / "initial.safetensors"
    save_file({"embedding": np.ones((64, 8), np.float32), "head": np.zeros(8, np.float32)}, file)
    return ("runs", "create", "demo", "--weights", str(file))


def test_a_run_is_created_steered_rolled_back_and_closed(
    skerry: Skerry, create: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "skerry learn" in skerry("runs", "list")
    created = json.loads(skerry(*create, "--set", "quorum_count=2", "--json"))
    assert (created["status"], created["parameter_count"]) == ("open", 520)
    assert [run["uid"] for run in json.loads(skerry("runs", "list", "--json"))] == [created["uid"]]
    assert "demo  open" in skerry("runs", "list")
    skerry(*create, status=3)

    policy = json.loads(skerry("runs", "policy", "demo", "--set", "outer.learning_rate=0.4", "--json"))
    assert (policy["quorum_count"], policy["outer"]["learning_rate"], policy["outer"]["momentum"]) == (2, 0.4, 0.8)
    position = str(created["position"])
    assert skerry("runs", "pin", "demo", "--position", position) == f"pinned positions: {position}\n"
    assert skerry("runs", "pin", "demo", "--position", position, "--remove") == "pinned positions: none\n"

    monkeypatch.setattr("skerry_syncer.merge.rollback._ANSWER_S", 0.0)  # the command asks until it is done
    rolled = json.loads(skerry("rollback", "demo", "--to", position, "--json"))
    assert {version["version"] for version in rolled["versions"]} == {1}
    digests = [[version["digest"] for version in run["versions"]] for run in (rolled, created)]
    assert digests[0] == digests[1], "the content is that of version 0"
    assert "roll-back to version 0" in skerry("runs", "versions", "demo", "--fragment", "embedding")
    with RunsClient(os.environ["SKERRY_TARGET"]) as client:
        client.report_metrics("demo", {"loss": 3.25}, judge="eval", position=created["position"])
    assert "loss 3.2500 of the merged model, by eval" in skerry("runs", "show", "demo")
    assert "closed demo at position" in skerry("runs", "close", "demo")


def test_a_run_is_deleted_once_that_is_confirmed(
    skerry: Skerry, create: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    skerry(*create)
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    skerry("runs", "delete", "demo", status=failures.ExitStatus.INTERRUPTED)
    skerry("runs", "delete", "demo", "--yes", "--uid", "0" * 32, status=failures.ExitStatus.REFUSED)
    assert "deleted demo" in skerry("runs", "delete", "demo", "--yes")
    assert json.loads(skerry("runs", "list", "--json")) == []


def test_a_run_is_shown_with_its_learners_and_with_who_made_its_versions(skerry: Skerry, target: str) -> None:
    problem = Quadratic()
    with ArrayLearner(problem.arrays, target=target, run="fit", learner_id="us", create=True, policy=QUICK) as learner:
        train_until([(problem, learner)], lambda: min(learner.stats.versions.values(), default=0) > 0)
        shown = skerry("runs", "show", "fit")
        assert json.loads(skerry("runs", "show", "fit", "--json"))["run"]["name"] == "fit"
        account = json.loads(skerry("runs", "account", "fit", "--json"))
        (row,) = account["learners"]
        assert (row["learner_id"], row["weight_share"]) == ("us", 1.0)
        assert row["version_count"] > 0
        *_, summed = skerry("runs", "account", "fit").splitlines()
        assert (summed.split()[0], summed.split()[4]) == ("us", "100.0%")
        assert skerry("runs", "eject", "fit", "us") == "ejected us from fit\n"
        assert " ejected " in skerry("runs", "show", "fit")
        readmitted = json.loads(skerry("runs", "readmit", "fit", "us", "--json"))
        assert (readmitted["learner_id"], readmitted["is_ejected"]) == ("us", False)
        assert "known=us" in skerry("runs", "eject", "fit", "eu", status=failures.ExitStatus.REFUSED)
    assert "1 live, 1 participating" in shown
    (fragment,) = [line.split() for line in shown.splitlines() if line.startswith("embedding ")]
    assert (fragment[1], fragment[5]) == ("2.4k", "100%")
    assert "outer.learning_rate" in shown
    versions = skerry("runs", "versions", "fit", "--fragment", "embedding")
    assert "us 100%" in versions
    assert "initial weights" in versions


@pytest.mark.parametrize(
    ("words", "status", "advice"),
    [
        (("show", "nowhere"), failures.ExitStatus.REFUSED, "[RUN_NOT_FOUND]\nnext: `skerry runs list`"),
        (
            ("list", "--target", "127.0.0.1:1", "--timeout", "0.5"),
            failures.ExitStatus.TRY_AGAIN,
            "[UNREACHABLE]\nnext: check that `skerry serve` is running there",
        ),
    ],
)
def test_a_call_that_fails_says_what_to_do_next(
    skerry: Skerry, words: tuple[str, ...], status: int, advice: str
) -> None:
    said = skerry("runs", *words, status=status)
    assert said.startswith("error: ")
    assert advice in said
    assert len(said.splitlines()) == 2
