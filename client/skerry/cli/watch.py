"""`skerry watch`: shows a run live in a terminal, or as lines for a script."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final

import click
from rich.console import RenderableType
from rich.live import Live

from skerry import RunsClient
from skerry.cli.connection import with_client, with_run
from skerry.cli.console import as_json, console, json_line
from skerry.cli.watch_state import EventLine, WatchState
from skerry.cli.watch_view import draw
from skerry.errors import RunNotFoundError, error_of, is_transient
from skerry.net.retry import Retry, RetrySettings
from skerry.runtime.options import Count, Number
from skerry.v1 import types_pb2 as v1
from skerry.v1.exchange_pb2 import WatchStart
from skerry.v1.types_pb2 import Event
from skerry.wire.messages import to_values

_REDRAWS_PER_S: Final = 4
_RETRY: Final = RetrySettings(attempt_count=None, first_wait_s=0.5)


@click.command(
    epilog="""\b
Columns:
  learner, region    the learner's id, and where it trains
  state              live: attached; participating: a recent round has its delta; finished: it has left;
                     lost: its lease ran out, and it has not said that it leaves
  step, tokens       that the learner has trained; from 0 again if it does not resume
  step time, loss    as the learner reports them; the line is the course of the loss
  up, down           mean of the last 10 s; with --once of all steps
  behind             versions that the learner has not adopted, at most
  stall              longest pause that Skerry made in a step, at the last report
  unsent             steps that the run does not have yet
  dropped            steps whose work is gone; then why the last call failed, or the last delta was not merged
  fragment, version  the newest version of each part of the model
  deltas             how many are in that version
  staleness          versions that were made since the oldest of them was begun
  participation      their share of the weight that was expected
  update             what a learner downloads of it
  round              the version whose deltas are being gathered

\b
Examples:
  skerry watch demo
  skerry watch demo --once
  skerry watch demo --json --after 1 | jq -c 'select(.event.version_committed)'
""",
)
@with_run
@click.option("--once", is_flag=True, help="Show the run once, and exit.")
@click.option("--after", "after_position", type=Count(), default=0, help="Start with the events after this position.")
@click.option(
    "--patience", "patience_s", type=Number(), default=300.0, help="Seconds to wait for the run or the syncer."
)
@as_json
@with_client
def watch(client: RunsClient, *, run: str, once: bool, after_position: int, patience_s: float, is_json: bool) -> None:
    """Follow a run: its learners, fragments, versions, staleness, bandwidth and loss.

    In a terminal this is a live table. In a pipe it prints one line per event, and with --json one JSON object per
    message, beginning with the current state of the run. It ends when the run is closed.
    """
    if once:
        _show_once(client, run, is_json=is_json)
        return
    screen = console()

    def tell(notice: str) -> None:
        if is_json or not screen.is_terminal:  # the table shows it by itself
            click.echo(notice, err=True)

    follower = Follower(client, run, after_position=after_position, patience_s=patience_s, tell=tell)
    if is_json:
        for message in follower.messages():
            key = "event" if isinstance(message, Event) else "start"
            click.echo(json_line({key: to_values(message)}))
    elif not screen.is_terminal:
        for line in follower.lines():
            click.echo(f"{line.position} {line.kind}: {line.text}")
    else:
        with Live(console=screen, get_renderable=follower.picture, refresh_per_second=_REDRAWS_PER_S):
            for _ in follower.lines():
                pass
    if follower.state.is_closed and not is_json:
        click.echo(f"{run} is closed at position {follower.state.position}")


class Follower:
    """Follows one run across broken streams and restarted replicas, and keeps its current state.

    One thread iterates over `messages` or `lines`; another may call `picture`.
    """

    def __init__(
        self,
        client: RunsClient,
        run: str,
        *,
        after_position: int = 0,
        patience_s: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
        jitter: random.Random | None = None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`tell` hears why a stream broke, once for each new reason."""
        self.state = WatchState()
        self._client = client
        self._run = run
        self._after_position = after_position
        self._patience_s = patience_s
        self._clock = clock
        self._wait = wait
        self._jitter = jitter or random.Random()
        self._notice = ""
        self._tell = tell
        self._told_count = 0
        self._heard_count = 0  # messages of the newest stream
        self._heard_at_s = 0.0
        self._lock = threading.Lock()

    def messages(self) -> Iterator[WatchStart | Event]:
        """Yields every message until the run is closed; after a broken stream it continues at the last position seen.

        Raises:
            SkerryError: the call was refused, or nothing was received for longer than `patience_s`; meanwhile a run
                that does not exist may be created.
        """
        self._heard_at_s = self._clock()
        retry = Retry(
            _RETRY,
            self._jitter,
            self._is_worth_waiting,
            has_progressed=lambda: self._heard_count > 0,
            before_pause=lambda _, error: self._say(
                f"{'waiting' if isinstance(error, RunNotFoundError) else 'reconnecting'}: {error}"
            ),
        )
        for attempt in retry.attempts(sleep=self._wait, is_late=self._is_out_of_patience):
            with attempt:
                yield from self._one_stream()

    def _is_worth_waiting(self, error: BaseException) -> bool:
        return is_transient(error) or (isinstance(error, RunNotFoundError) and not self.state.position)

    def _one_stream(self) -> Iterator[WatchStart | Event]:
        """Yields a stream's messages, and returns once the run is closed.

        Raises:
            TryAgainError: the stream broke, or ended before the run did.
        """
        self._heard_count = 0
        for message in self._client.watch(self._run, after_position=self._after_position):
            self._heard_at_s = self._clock()
            self._heard_count += 1
            self._take(message)
            yield message
            if self._is_over(message):
                return
        raise error_of("UNREACHABLE", "the syncer ended the stream")  # as a replica does that drains

    def _is_out_of_patience(self, _pause_s: float) -> bool:
        return self._clock() - self._heard_at_s > self._patience_s

    def lines(self) -> Iterator[EventLine]:
        """Yields, in words, every event except unchanged reports."""
        told_count = 0
        for _ in self.messages():
            if self._told_count > told_count:
                told_count = self._told_count
                yield self.state.events[-1]

    def picture(self) -> RenderableType:
        """Returns the current state of the run as a table."""
        with self._lock:
            return draw(self.state, notice=self._notice)

    def _is_over(self, message: WatchStart | Event) -> bool:
        """Whether no more events can follow: the run was closed already, or was closed by this event."""
        if isinstance(message, Event):
            return message.status_changed == v1.RUN_STATUS_CLOSED
        is_past_wanted = 0 < self._after_position < message.run.position
        return message.run.status == v1.RUN_STATUS_CLOSED and not is_past_wanted

    def _take(self, message: WatchStart | Event) -> None:
        with self._lock:
            self._notice = ""
            if self.state.apply(message, self._clock()) is not None:
                self._told_count += 1
            if isinstance(message, Event):
                self._after_position = max(self._after_position, message.position)

    def _say(self, notice: str) -> None:
        if notice != self._notice:
            self._tell(notice)
        with self._lock:
            self._notice = notice


def _add_versions(client: RunsClient, state: WatchState) -> None:
    """Adds how each fragment's newest version was made."""
    for name, view in state.fragments.items():
        if view.version:
            for record in islice(client.list_versions(state.name, name), 1):
                state.apply_version(record)


def _show_once(client: RunsClient, run: str, *, is_json: bool) -> None:
    answer = client.get_run(run)
    if is_json:
        click.echo(json_line(to_values(answer)))
        return
    state = WatchState()
    state.apply(WatchStart(run=answer.run, learners=answer.learners), 0.0)
    _add_versions(client, state)
    if answer.run.status == v1.RUN_STATUS_DRAFT:
        click.echo("this run is a draft: its initial weights are not complete")
    console().print(draw(state))
