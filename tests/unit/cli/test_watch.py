"""`skerry watch`: what it prints, and how it follows a run across streams that break, end, or never come."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from skerry import RunNotFoundError, RunsClient, SkerryError, TryAgainError
from skerry.cli import failures
from skerry.cli.main import cli
from skerry.errors import error_of
from skerry.history.following import follow
from skerry.runtime.clock import SystemClock
from skerry.v1 import types_pb2 as v1
from skerry.v1.exchange_pb2 import WatchStart

AWAY = error_of("STORE_UNAVAILABLE", "the store is away")
CLOSED = v1.Event(position=30, status_changed=v1.RUN_STATUS_CLOSED)
OPEN = WatchStart(run=v1.Run(name="demo", uid="1", status=v1.RUN_STATUS_OPEN, position=9))


class Streams:
    """A client whose watch streams are these, one after another."""

    def __init__(self, *streams: Sequence[WatchStart | v1.Event | SkerryError]) -> None:
        self._streams = list(streams)
        self.asked: list[int] = []  # after which positions
        self.uids: list[str] = []  # of which runs

    def watch(self, _run: str, *, uid: str, after_position: int) -> Iterator[WatchStart | v1.Event]:
        self.asked.append(after_position)
        self.uids.append(uid)
        for message in self._streams.pop(0):
            if isinstance(message, SkerryError):
                raise message
            yield message


class Clock(SystemClock):
    """A clock whose waits end at once, and of which each reading is `step_s` later than the one before."""

    def __init__(self, step_s: float = 0.0) -> None:
        self._step_s = step_s
        self.now_s = 0.0

    def monotonic_s(self) -> float:
        self.now_s += self._step_s
        return self.now_s

    def block(self, duration_s: float) -> None:
        pass


def positions(streams: Streams, *, clock: Clock | None = None, **options: Any) -> list[int]:
    """Returns the positions of all events until the run is closed."""
    client: Any = streams
    followed = follow(client, "demo", clock=clock or Clock(), **options)
    return [message.position for message in followed if isinstance(message, v1.Event)]


def test_a_stream_that_breaks_or_ends_goes_on_after_the_last_position_seen() -> None:
    streams = Streams([OPEN, v1.Event(position=10), AWAY], [AWAY], [OPEN, v1.Event(position=11)], [OPEN, CLOSED])
    said: list[str] = []
    assert positions(streams, tell=said.append) == [10, 11, 30]
    assert streams.asked == [0, 10, 10, 11]
    assert streams.uids == ["", "1", "1", "1"]  # never another run that has the name by then
    assert said == ["reconnecting: the store is away", "reconnecting: the syncer ended the stream"]


def test_a_closed_run_still_tells_its_past() -> None:
    closed = WatchStart(run=v1.Run(status=v1.RUN_STATUS_CLOSED, position=30))
    assert positions(Streams([closed, v1.Event(position=8), CLOSED]), after_position=1) == [8, 30]
    assert positions(Streams([closed, v1.Event(position=8), CLOSED])) == []


def test_a_closed_run_can_be_followed_on_for_what_judges_report_then() -> None:
    client: Any = Streams([OPEN, CLOSED, v1.Event(position=31)], [AWAY])
    followed = follow(client, "demo", clock=Clock(100.0), patience_s=0, until_closed=False)
    assert [message.position for message in islice(followed, 1, 3) if isinstance(message, v1.Event)] == [30, 31]


def test_patience_ends() -> None:
    streams = Streams(*[[AWAY]] * 50)
    with pytest.raises(TryAgainError, match="away"):
        positions(streams, patience_s=250, clock=Clock(100.0))
    assert len(streams.asked) == 3


def test_patience_begins_when_the_stream_breaks_however_long_nothing_happened() -> None:
    clock = Clock()

    class Quiet(Streams):
        def watch(self, run: str, *, uid: str, after_position: int) -> Iterator[WatchStart | v1.Event]:
            for message in super().watch(run, uid=uid, after_position=after_position):
                yield message
                clock.now_s += 3600.0

    assert positions(Quiet([OPEN, AWAY], [OPEN, CLOSED]), patience_s=250, clock=clock) == [30]


def test_a_run_is_waited_for_until_it_was_there_once() -> None:
    missing = error_of("RUN_NOT_FOUND", "no such run")
    assert positions(Streams([missing], [OPEN, CLOSED])) == [30]
    with pytest.raises(RunNotFoundError):
        positions(Streams([OPEN], [missing]))


@pytest.fixture
def closed_run(target: str) -> str:
    """Where a syncer listens with the run "demo", which is closed."""
    with RunsClient(target) as client:
        client.create_run("demo", {"head": np.zeros(8, np.float32)})
        client.close_run("demo")
    return target


def test_into_a_pipe_every_event_is_a_line_or_with_json_every_message(
    closed_run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["watch", "demo", "--after", "1", "--target", closed_run]
    assert failures.run(cli, words) == 0
    *_, change, end = capsys.readouterr().out.splitlines()
    position = change.partition(" ")[0]
    assert change == f"{position} status_changed: the run is closed"
    assert end == f"demo is closed at position {position}"
    assert failures.run(cli, [*words, "--json"]) == 0
    start, *_, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert start["start"]["run"]["name"] == "demo"
    assert last["event"].pop("time")
    assert last["event"] == {"position": int(position), "status_changed": "closed"}


def test_in_a_terminal_the_table_shows_the_run(closed_run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=200)
    monkeypatch.setattr("skerry.cli.watch.console", lambda: screen)
    assert failures.run(cli, ["watch", "demo", "--after", "1", "--target", closed_run]) == 0
    assert isinstance(screen.file, io.StringIO)
    assert "the run is closed" in screen.file.getvalue()


def test_a_run_that_is_not_there_is_waited_for_as_long_as_it_was_asked(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["watch", "nowhere", "--patience", "0.1", "--target", target]
    assert failures.run(cli, arguments) == failures.ExitStatus.REFUSED
    said = capsys.readouterr().err
    assert "waiting: no such run" in said
    assert "RUN_NOT_FOUND" in said
