"""Follows one run for everybody who looks at it: its history, its alerts, and what changed since a page was made."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from typing import Any, Final, NamedTuple

from skerry import RunsClient, SkerryError
from skerry.history.alerts import Alert, Severity, alerts, duration_text
from skerry.history.following import follow
from skerry.history.run_history import EventText, RunHistory
from skerry.runtime.clock import SystemClock
from skerry.runtime.identifiers import system_random
from skerry.runtime.logs import get_logger
from skerry.v1.exchange_pb2 import WatchStart
from skerry.v1.types_pb2 import RUN_STATUS_CLOSED
from skerry_console.pictures import (
    adoption_columns,
    curve_columns,
    curves,
    items,
    loss_figure,
    mark_columns,
    round_columns,
    version_cells,
)
from skerry_console.view import Settings, events_html, sections

_LOG: Final = get_logger(__name__)
_CLOCK: Final = SystemClock()
_TICK_S: Final = 0.5
_TICKS_A_SIGN: Final = 20
_FOR_EVER_S: Final = 1e9
_RECENT_COUNT: Final = 500  # entries that are read first, which takes a syncer less than a second
_WHOLE_COUNT: Final = 100_000  # entries of the longest log that is read from its beginning, which takes minutes
_AWAY_S: Final = 60.0  # after which a syncer that does not answer is an alert
_AWAY_ACTION: Final = "Look whether a replica runs, and whether the console reaches it. Learners train on meanwhile."


class RunFeed:
    """One run, followed on a thread of its own until `close`.

    It is followed from its beginning. If its `position` is given it is followed from shortly before that. What is older
    is read by another thread meanwhile, unless the log is long.
    """

    def __init__(self, connect: Callable[[], RunsClient], run: str, settings: Settings, *, position: int = 0) -> None:
        self.run = run
        self._connect = connect
        self.id = system_random().randbytes(8).hex()
        self.error: str | None = None  # why the run can't be followed now
        self.failure: SkerryError | None = None  # why it is not followed any more
        self._broke_at_s: float | None = None  # when nothing was heard any more; None: the run is followed
        self._is_closed = False
        self._settings = settings
        self._history = RunHistory(max(1, position - _RECENT_COUNT))
        # What changed the history, from its start on, while the past is read; None: it is not read.
        self._since: list[Callable[[RunHistory], object]] | None
        self._since = None if self._history.is_whole or position > _WHOLE_COUNT else []
        self._lock = threading.Lock()
        self._client = connect()
        self._started = threading.Event()
        self._current = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"follow {run}", daemon=True)
        self._thread.start()
        if self._since is not None:
            reading = threading.Thread(target=self._read_past, args=[self._since], name=f"past of {run}", daemon=True)
            reading.start()

    def close(self) -> None:
        """Stops following."""
        self._is_closed = True
        self._client.close()

    def wait_started(self, timeout_s: float) -> None:
        """Returns when the run's state is there.

        Raises:
            SkerryError: the syncer refuses the call.
            TimeoutError: it does not answer.
        """
        if not self._started.wait(timeout_s):
            raise TimeoutError(self.error or "the syncer does not answer")
        if self.failure is not None and not self._history.name:
            raise self.failure

    def wait_current(self, timeout_s: float) -> None:
        """Returns when the newest of the log is in the history, or after `timeout_s` with what came so far.

        Raises:
            SkerryError, TimeoutError: as `wait_started`.
        """
        self.wait_started(timeout_s)
        self._current.wait(timeout_s)

    def wait_closed(self, patience_s: float) -> None:
        """Returns when the run is closed and its judges have reported of the last version, for `patience_s` at most.

        Raises:
            SkerryError: the run can't be followed any more.
        """
        ends_at_s = math.inf
        while self._thread.is_alive() and _CLOCK.monotonic_s() < ends_at_s:
            with self.history() as history:
                if history.is_current and history.status == RUN_STATUS_CLOSED:
                    ends_at_s = min(ends_at_s, 0.0 if history.is_judged else _CLOCK.monotonic_s() + patience_s)
            self._thread.join(_TICK_S)
        if self.failure is not None:
            raise self.failure

    @contextmanager
    def history(self) -> Iterator[RunHistory]:
        """Yields the history, which does not change inside the context."""
        with self._lock:
            yield self._history

    def alerts(self) -> list[Alert]:
        """Returns what is wrong now.

        While no syncer answers nobody knows how long learners are silent. Nothing is known to be wrong before the past
        is told, or with a run that is deleted.
        """
        if self.failure is not None or not self._current.is_set():
            return []
        with self.history() as history:
            raised = alerts(history, self._known_until_s())
        if self._broke_at_s is not None and (away_s := _CLOCK.unix_s() - self._broke_at_s) >= _AWAY_S:
            summary = f"no syncer has answered for {duration_text(away_s)}: {self.error}"
            raised.insert(0, Alert("SkerryReplicaDown", "syncer", Severity.CRITICAL, summary, _AWAY_ACTION))
        return raised

    def _known_until_s(self) -> float:
        """Returns the time now, since 1970, or when the stream broke."""
        return _CLOCK.unix_s() if self._broke_at_s is None else self._broke_at_s

    async def changes(self, page_feed: str) -> AsyncIterator[str]:
        """Yields server-sent events of what changes, twice a second at most; the first has every part and picture.

        The last one asks for a new page: the run is not followed any more, or the page is of another feed.
        """
        shown: dict[str, str] = {}
        told: EventText | None = None
        drawn: _Drawn | None = None
        quiet_ticks = 0

        def look() -> dict[str, Any]:
            nonlocal shown, told, drawn
            with self.history() as history:
                fresh = sections(history, self._settings, self._known_until_s(), problem=self.error or "")
                changed = {name: html for name, html in fresh.items() if shown.get(name) != html}
                change: dict[str, Any] = {"sections": changed} if changed else {}
                newest = history.events[-1] if history.events else None
                if drawn is None or drawn.history is not history:  # the past is there now
                    change["pictures"] = items(history)
                else:
                    change |= _picture_changes(drawn, has_events=newest is not told)
                if newest is not told:
                    change["events"], told = events_html(history, "", 0), newest
                counts = {name: series.added_count for name, series in curves(history).items()}
                shown, drawn = fresh, _Drawn(history, history.applied_position, counts)
            return change

        while page_feed == self.id and self.failure is None:
            change = await asyncio.to_thread(look)  # pictures of a large run take a second
            quiet_ticks = 0 if change else quiet_ticks + 1
            if change:
                yield f"data: {json.dumps(change)}\n\n"
            elif quiet_ticks % _TICKS_A_SIGN == 0:
                yield ": nothing new\n\n"  # so that proxies keep the stream, and a page that is gone is noticed
            await asyncio.sleep(_TICK_S)
        yield 'data: {"reload": true}\n\n'

    def _follow(self) -> None:
        try:
            for message in follow(
                self._client,
                self.run,
                after_position=self._history.told_after,
                patience_s=_FOR_EVER_S,
                until_closed=False,
                tell=self._tell,
            ):
                self._apply(partial(RunHistory.apply, message=message, now_s=_CLOCK.unix_s()))
                self.error = self._broke_at_s = None
                self._started.set()
                if self._history.is_current:
                    self._current.set()
        except (CancelledError, RuntimeError):  # by `close`, while the thread waits for a message or applies one
            if not self._is_closed:
                raise
        except SkerryError as error:
            self.failure = error
        self._started.set()
        self._current.set()

    def _apply(self, change: Callable[[RunHistory], object]) -> None:
        with self._lock:
            change(self._history)
            if self._since is not None and self._history.name:
                self._since.append(change)

    def _read_past(self, since: list[Callable[[RunHistory], object]]) -> None:
        """Reads what is older than the history, makes what changed `since` once more, and shows that instead."""
        self._current.wait()
        whole, client = RunHistory(told_after=1), self._connect()
        try:
            for start in since[:1]:
                start(whole)
            for message in follow(client, self.run, after_position=1, patience_s=_FOR_EVER_S, until_closed=False):
                if self._is_closed or self.failure is not None:
                    return
                if isinstance(message, WatchStart):
                    continue
                if message.position > self._history.told_after:
                    break
                whole.apply(message)
            with self._lock:
                for change in since:
                    change(whole)
                self._history = whole
        except SkerryError as error:
            _LOG.warning("the past of the run can't be read", run=self.run, cause=str(error))
        finally:
            self._since = None
            client.close()

    def _tell(self, reason: str) -> None:
        self.error = reason
        if self._broke_at_s is None:
            self._broke_at_s = _CLOCK.unix_s()
            text = f"the replica does not tell of the run any more; {reason}"
            self._apply(partial(RunHistory.note, text=text, now_s=self._broke_at_s))
        _LOG.warning("the run can't be followed", run=self.run, cause=reason)


class _Drawn(NamedTuple):
    """What a page shows of a history: up to which log position, and how many points of each curve."""

    history: RunHistory
    position: int
    point_counts: dict[str, int]


def _picture_changes(drawn: _Drawn, *, has_events: bool) -> dict[str, Any]:
    """Returns what the pictures' sources gained since; the picture of losses anew if there is another curve."""
    history, known = drawn.history, curves(drawn.history)
    change: dict[str, Any] = {}
    if known.keys() != drawn.point_counts.keys():
        change["pictures"] = items(history, loss_figure)
    else:
        grown = {name: series.added_after(drawn.point_counts[name]) for name, series in known.items()}
        if added := {name: curve_columns(points) for name, points in grown.items() if points}:
            change["points"] = added
    if not change and not has_events:
        return {}
    rows = {name: row for row, name in enumerate(history.fragments)}
    new = takewhile(lambda view: view.position > drawn.position, reversed(history.versions))
    return change | {
        "cells": version_cells(new, rows),
        "columns": {
            "rounds": round_columns(history),
            "adoptions": adoption_columns(history),
            "marks": mark_columns(history),
        },
    }
