"""`skerry runs` and `skerry rollback` against a server of the contract, as a person or a script runs them."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from skerry.cli import failures
from skerry.cli.main import cli
from skerry.v1 import runs_pb2
from tests.unit.cli.scripted_syncer import Script, scripted, serving, small_learner, small_run


@pytest.fixture
def script() -> Script:
    script = scripted()
    script.learners.append(small_learner("eu", is_participating=False))
    return script


@pytest.fixture(autouse=True)
def _target(script: Script, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with serving(script) as target:
        monkeypatch.setenv("SKERRY_TARGET", target)
        yield


def skerry(*arguments: str) -> int:
    return int(failures.run(cli, list(arguments)))


def test_list_shows_every_run_or_what_to_do(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    script.runs["other"] = small_run("other")
    assert skerry("runs", "list") == 0
    shown = capsys.readouterr().out
    assert "demo" in shown
    assert "other" in shown
    assert "3-4" in shown
    assert skerry("runs", "list", "--json") == 0
    run, _ = json.loads(capsys.readouterr().out)
    assert (run["name"], run["status"], run["parameter_count"], run["position"]) == ("demo", "open", 6, 9)
    script.runs.clear()
    assert skerry("runs", "list") == 0
    assert "skerry learn" in capsys.readouterr().out


def test_show_tells_live_from_participating(capsys: pytest.CaptureFixture[str]) -> None:
    assert skerry("runs", "show", "demo") == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("us " in line and "participating" in line for line in lines)
    assert any("eu " in line and "participating" not in line and "live" in line for line in lines)
    assert any("outer.learning_rate" in line and "0.8" in line for line in lines)


def test_versions_say_who_made_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert skerry("runs", "versions", "demo", "--fragment", "head") == 0
    shown = capsys.readouterr().out
    assert "us 100% (stale by 1)" in shown
    assert "initial weights" in shown


def test_close_waits_and_says_where_the_run_ended(capsys: pytest.CaptureFixture[str]) -> None:
    assert skerry("runs", "close", "demo") == 0
    assert capsys.readouterr().out == "closed demo at position 9, versions 3-4\n"


def test_a_terminal_without_a_character_shows_something_else(script: Script) -> None:
    script.learners = [small_learner(region="Zürich 東京")]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    words = [sys.executable, "-m", "skerry.cli", "runs", "show", "demo"]
    shown = subprocess.run(words, env=environment, capture_output=True, timeout=60, check=True)
    assert b"Z?rich ??" in shown.stdout
    shown = subprocess.run([*words, "--json"], env=environment, capture_output=True, timeout=60, check=True)
    assert json.loads(shown.stdout)["learners"][0]["region"] == "Zürich 東京"


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
    words: tuple[str, ...], status: int, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert skerry("runs", *words) == status
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert advice in said
    assert len(said.splitlines()) == 2


def test_policies_and_pins_change_only_what_is_set(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    assert skerry("runs", "policy", "demo", "--set", "outer.learning_rate=0.4", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["outer"] == {"name": "nesterov", "learning_rate": 0.4, "momentum": 0.9, "schedule": "constant"}
    assert skerry("runs", "pin", "demo", "--position", "3") == 0
    policies = [request.policy for request in script.asked(runs_pb2.SetPolicyRequest)]
    assert [[field.name for field, _ in policy.ListFields()] for policy in policies] == [
        ["outer"],
        ["pinned_positions"],
    ]
    assert list(policies[1].pinned_positions) == [3]


def test_delete_names_the_uid_that_was_confirmed(
    script: Script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    assert skerry("runs", "delete", "demo") == failures.ExitStatus.INTERRUPTED
    assert "demo" in script.runs
    assert skerry("runs", "delete", "demo", "--yes") == 0
    (request,) = script.asked(runs_pb2.DeleteRunRequest)
    assert request.run_uid == small_run().uid
    assert "deleted demo" in capsys.readouterr().out


def test_rollback_names_the_position_and_asks_again_until_it_is_done(
    script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    script.progress = [runs_pb2.RollBackProgress(stored_count=stored, fragment_count=3) for stored in (0, 2)]
    assert skerry("rollback", "demo", "--to", "5") == 0
    asked = script.asked(runs_pb2.RollBackRequest)
    assert [request.target_position for request in asked] == [5, 5, 5]
    assert len({request.request_id for request in asked}) == 1
    assert "back to position 5: now position 10" in capsys.readouterr().out
