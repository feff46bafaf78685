"""What a page is told of the changes since it was made."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any

import pytest

from skerry import SkerryError
from skerry.errors import error_of
from skerry.runtime.clock import SystemClock
from skerry.v1 import types_pb2 as v1
from skerry.v1.exchange_pb2 import WatchStart
from skerry_console.feed import RunFeed
from skerry_console.view import Settings
from tests.support import recorded_run as recorded

_RUN = v1.Run(name="demo", uid="1", status=v1.RUN_STATUS_OPEN, position=4)
_RUN.fragments.add(name="head")


class Stream:
    """A client of a run whose events a test says."""

    def __init__(self, run: v1.Run = _RUN) -> None:
        self._messages: queue.Queue[WatchStart | v1.Event | Exception] = queue.Queue()
        self._read = threading.Semaphore(0)
        self._messages.put(WatchStart(run=run, learners=[recorded.learner("eu")] if run is not _RUN else []))

    def watch(self, _run: str, **_: Any) -> Iterator[WatchStart | v1.Event]:
        while True:
            message = self._messages.get()
            if isinstance(message, Exception):
                raise message
            yield message
            self._read.release()

    def tell(self, *messages: v1.Event | Exception) -> None:
        for message in messages:
            self._messages.put(message)
        for message in messages:
            if not isinstance(message, Exception):
                self._read.acquire()

    def close(self) -> None:
        self._messages.put(CancelledError())


@contextmanager
def followed() -> Iterator[tuple[RunFeed, Stream]]:
    stream: Any = Stream()
    feed = RunFeed(lambda: stream, "demo", Settings(prices={}))
    feed.wait_started(20)
    stream._read.acquire()
    try:
        yield feed, stream
    finally:
        feed.close()


async def next_change(changes: AsyncIterator[str]) -> dict[str, Any]:
    async for event in changes:
        if "data: " in event:
            change: dict[str, Any] = json.loads(event.partition("data: ")[2])
            return change
    return {}


async def test_a_report_through_a_replica_whose_clock_is_an_hour_behind_is_drawn() -> None:
    with followed() as (feed, stream):
        stream.tell(recorded.event(7200.0, learner=recorded.learner(loss=3.0)))
        changes = feed.changes(feed.id)
        assert "pictures" in await next_change(changes)
        stream.tell(recorded.event(3600.0, learner=recorded.learner(loss=2.0, step_count=11)))
        change = await next_change(changes)
        assert change["points"]["loss us"]["value"] == [2.0]


async def test_a_new_curve_draws_the_picture_of_losses_anew_and_no_other() -> None:
    with followed() as (feed, stream):
        stream.tell(recorded.event(100.0, learner=recorded.learner(loss=3.0)))
        changes = feed.changes(feed.id)
        assert len((await next_change(changes))["pictures"]) == 3
        stream.tell(recorded.event(101.0, learner=recorded.learner("eu", loss=2.0)))
        stream.tell(*recorded.round_events(1, 102.0, "eu"))
        change = await next_change(changes)
        while "cells" not in change or not change["cells"]:
            change |= await next_change(changes)
        assert (list(change["pictures"]), change["cells"]) == (["losses"], [[0, 1, 1, 0, 1500]])


async def test_the_page_of_another_feed_or_of_a_run_that_is_gone_is_made_anew() -> None:
    with followed() as (feed, stream):
        assert await next_change(feed.changes("another")) == {"reload": True}
        changes = feed.changes(feed.id)
        assert "sections" in await next_change(changes)
        stream.tell(error_of("RUN_REPLACED", "the name belongs to another run now"))
        with pytest.raises(SkerryError, match="another run"):
            feed.wait_closed(20)
        assert await next_change(changes) == {"reload": True}
        assert feed.alerts() == []


def test_learners_are_not_silent_because_the_syncer_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = time.time()
    with followed() as (feed, stream):
        stream.tell(recorded.event(now_s, position=4, learner=recorded.learner()))
        stream.tell(error_of("UNREACHABLE", "connection refused"))
        while feed.error is None:
            threading.Event().wait(0.01)
        monkeypatch.setattr(SystemClock, "unix_s", lambda _: now_s + 600.0)
        (alert,) = feed.alerts()
        assert alert.summary == "no syncer has answered for 10 min: reconnecting: connection refused"


async def test_the_past_raises_no_alert_while_it_is_told() -> None:
    full = recorded.learner(problem="STORE_FULL")
    with followed() as (feed, stream):
        stream.tell(recorded.event(100.0, position=3, learner=full))
        assert feed.alerts() == []
        stream.tell(recorded.event(100.0, position=4, learner=full))
        feed.wait_current(20)
        assert [alert.rule for alert in feed.alerts()] == ["SkerryStoreFull"]


def test_a_feed_that_is_closed_while_it_applies_a_message_ends_quietly() -> None:
    stream: Any = Stream()
    stream.close = lambda: stream.tell(RuntimeError("Event loop is closed"))  # as a client does then
    feed = RunFeed(lambda: stream, "demo", Settings(prices={}))
    feed.close()
    feed.wait_closed(20)


async def test_the_newest_is_shown_first_and_the_past_with_it_once_it_is_read() -> None:
    run = v1.Run(name="demo", uid="1", status=v1.RUN_STATUS_OPEN, position=2000)
    run.fragments.add(name="head")
    recent, past = Stream(run), Stream(run)
    clients: Any = iter((recent, past))
    feed = RunFeed(lambda: next(clients), "demo", Settings(prices={"eu": 1.0}), position=2000)
    recent._read.acquire()
    recent.tell(*recorded.round_events(9, 5000.0, "eu", position=1998))
    feed.wait_current(20)
    changes = feed.changes(feed.id)
    first = await next_change(changes)
    assert "shown from position 1500 on" in first["sections"]["headline"]
    assert [">goodput</dt><dd>no data<" in first["sections"]["kpis"], ">cost<" in first["sections"]["kpis"]] == [
        True,
        False,
    ]
    past._read.acquire()
    past.tell(*recorded.round_events(8, 4000.0, "eu", position=10))
    recent.tell(error_of("UNREACHABLE", "the replica drains"))
    recent.tell(*recorded.round_events(10, 5010.0, "eu", position=2001))
    past._messages.put(v1.Event(position=1501))
    while "pictures" not in (change := await next_change(changes)):
        pass
    assert "shown from" not in change["sections"]["headline"]
    assert ">goodput</dt><dd>100%<" in change["sections"]["kpis"]
    with feed.history() as history:
        assert [view.version for view in history.versions] == [8, 9, 10]
        assert [event.text for event in history.events if "the replica drains" in event.text], "it is in no log"
    feed.close()
    past.close()


async def test_the_past_of_a_long_log_is_not_read_and_goodput_is_that_of_what_is_shown() -> None:
    run = v1.Run(name="demo", uid="1", status=v1.RUN_STATUS_OPEN, position=1_000_000)
    run.fragments.add(name="head")
    stream: Any = Stream(run)
    clients = iter([stream])
    feed = RunFeed(lambda: next(clients), "demo", Settings(prices={"eu": 1.0}), position=1_000_000)
    stream._read.acquire()
    stream.tell(*recorded.round_events(9, 5000.0, "eu", position=999_990))
    stream.tell(recorded.event(5001.0, 1_000_000, learner=recorded.learner("eu", step_count=48)))
    stream.tell(*recorded.round_events(10, 5010.0, "eu", position=1_000_001))
    feed.wait_current(20)
    shown = (await next_change(feed.changes(feed.id)))["sections"]
    assert "shown from position 999500 on" in shown["headline"]
    assert ">goodput</dt><dd>63%<" in shown["kpis"], "24 merged of the 38 that were taken since its first report"
    assert ">cost<" not in shown["kpis"]
    feed.close()
