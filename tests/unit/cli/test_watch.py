"""`skerry watch` across streams that break, end, or never come."""

from __future__ import annotations

import io
import json
import re

import grpc
import pytest
from rich.console import Console

from skerry import RunsClient
from skerry.cli import failures
from skerry.cli.main import cli
from skerry.cli.watch import Follower
from skerry.cli.watch_view import sparkline
from skerry.errors import TryAgainError
from skerry.v1 import exchange_pb2
from skerry.v1 import types_pb2 as v1
from tests.unit.cli.scripted_syncer import Refusal, scripted, serving

CLOSED = v1.Event(position=30, status_changed=v1.RUN_STATUS_CLOSED)
AWAY = Refusal(grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE", "the store is away", retry_after_s=0.01)


def commit(version: int, position: int) -> v1.Event:
    """Returns the event of a commit of the fragment head."""
    merged = [v1.DeltaFate(learner_id="us", weight_share=1.0)]
    committed = v1.VersionCommitted(version=v1.FragmentVersion(fragment="head", version=version), merged=merged)
    return v1.Event(position=position, version_committed=committed)


def positions(follower: Follower) -> list[int]:
    """Returns the positions of all events until the run is closed."""
    return [message.position for message in follower.messages() if isinstance(message, v1.Event)]


def test_into_a_pipe_every_event_is_a_line_or_with_json_every_message(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(scripted(*[[commit(5, 10), CLOSED]] * 2)) as target:
        assert failures.run(cli, ["watch", "demo", "--target", target]) == 0
        assert capsys.readouterr().out.splitlines() == [
            "10 version_committed: head is at version 5 by us 100%",
            "30 status_changed: the run is closed",
            "demo is closed at position 30",
        ]
        assert failures.run(cli, ["watch", "demo", "--json", "--target", target]) == 0
    start, first, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert start["start"]["run"]["name"] == "demo"
    assert first["event"]["version_committed"]["version"]["version"] == 5
    assert last["event"] == {"position": 30, "status_changed": "closed"}


def test_once_shows_learners_and_fragments(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(scripted()) as target:
        assert failures.run(cli, ["watch", "demo", "--once", "--target", target]) == 0
    shown = capsys.readouterr().out
    assert "1 live, 1 participating" in shown
    assert "35 ms" in shown
    assert "embedding" in shown
    (head,) = [line for line in shown.splitlines() if line.startswith("head ")]
    assert head.split() == ["head", "4", "1", "1", "75%", "1.5", "kB"]


def test_the_help_explains_every_column(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(scripted()) as target:
        failures.run(cli, ["watch", "demo", "--once", "--target", target])
    _, learners, fragments = [part.splitlines()[0] for part in capsys.readouterr().out.split("\n\n")]
    assert failures.run(cli, ["watch", "--help"]) == 0
    legend = capsys.readouterr().out
    columns = re.split(r"\s{2,}", f"{learners.strip()}  {fragments.strip()}")
    assert len(columns) == 22
    for column in columns:
        assert re.search(rf"^ +([a-z ]+, )?{column}[, ]", legend, re.MULTILINE), column


def test_a_stream_that_breaks_goes_on_after_the_last_position_seen() -> None:
    script = scripted([commit(5, 10), AWAY], [commit(6, 11)], [CLOSED])
    waits: list[float] = []
    with serving(script) as target, RunsClient(target) as client:
        assert positions(Follower(client, "demo", wait=waits.append)) == [10, 11, 30]
    assert waits
    asked = [request.after_position for request in script.asked(exchange_pb2.WatchRequest)]
    assert asked[0] == 0
    assert asked[-2:] == [10, 11]


def test_a_closed_run_still_tells_its_past() -> None:
    script = scripted([commit(4, 8), CLOSED], [commit(4, 8), CLOSED])
    script.runs["demo"].status = v1.RUN_STATUS_CLOSED
    with serving(script) as target, RunsClient(target) as client:
        assert positions(Follower(client, "demo", after_position=1)) == [8, 30]
        assert positions(Follower(client, "demo")) == []


def test_patience_ends() -> None:
    script = scripted(*[AWAY] * 50)
    now = iter(range(0, 10_000, 100))
    with serving(script) as target, RunsClient(target) as client:
        follower = Follower(client, "demo", patience_s=250, clock=lambda: float(next(now)), wait=lambda _: None)
        with pytest.raises(TryAgainError, match="away"):
            list(follower.messages())


def test_a_run_that_is_not_there_is_waited_for_as_long_as_it_was_asked(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(scripted()) as target:
        arguments = ["watch", "nowhere", "--patience", "0.1", "--target", target]
        assert failures.run(cli, arguments) == failures.ExitStatus.REFUSED
    said = capsys.readouterr().err
    assert "waiting: no such run" in said
    assert "RUN_NOT_FOUND" in said


def test_a_run_that_is_created_meanwhile_is_followed() -> None:
    script = scripted([CLOSED])
    run = script.runs.pop("demo")
    with serving(script) as target, RunsClient(target) as client:
        follower = Follower(client, "demo", wait=lambda _: script.runs.update(demo=run))
        assert positions(follower) == [30]


def test_in_a_terminal_the_table_shows_the_run_and_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=200)
    monkeypatch.setattr("skerry.cli.watch.console", lambda: screen)
    with serving(scripted([commit(5, 10), AWAY], [CLOSED])) as target:
        assert failures.run(cli, ["watch", "demo", "--target", target]) == 0
    assert isinstance(screen.file, io.StringIO)
    shown = screen.file.getvalue()
    assert "head is at version 5 by us 100%" in shown
    assert "the run is closed" in shown


def test_a_sparkline_spans_its_own_range() -> None:
    assert sparkline([1.0, 0.5, 0.0]) == "█▅▁"
    assert sparkline([1.0]) == ""
    assert sparkline([2.0, 2.0]) == "▁▁"
