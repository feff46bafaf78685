"""`skerry watch`: shows a run live in a terminal, or as lines for a script."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Final

import click
from rich.live import Live

from skerry import RunsClient, SkerryError
from skerry.cli.connection import with_client, with_run
from skerry.cli.console import as_json, console, json_line
from skerry.cli.watch_state import WatchState, state_now
from skerry.cli.watch_view import draw
from skerry.errors import RunNotFoundError, error_of, is_transient
from skerry.net.retry import RetrySettings
from skerry.runtime.identifiers import system_random
from skerry.runtime.options import Count, Number
from skerry.v1 import types_pb2 as v1
from skerry.v1.exchange_pb2 import WatchStart
from skerry.v1.types_pb2 import Event
from skerry.wire.messages import to_values

_REDRAWS_PER_S: Final = 4
_PAUSES: Final = RetrySettings(first_wait_s=0.5)


@click.command(
    epilog="""\b
Columns:
  learner, region    the learner's id, and where it trains
  state              live: attached; participating: a recent round has its delta; finished: it has left;
                     lost: its lease ran out, and it has not said that it leaves
  step, tokens       that the learner has trained; from 0 again if it does not resume
  step time, loss    as the learner reports them
  trend              of the loss, as a line
  up, down           mean over the last reports, or at first over all steps
  behind             versions that the learner has not adopted, at most
  stall              longest pause that Skerry made in a step, at the last report
  unsent             steps that the run does not have yet
  dropped            steps whose work is gone
  problem            why the last call failed, or the last delta was not merged
  fragment, version  the newest version of each part of the model
  elements           the values that the fragment has
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
@click.option("--after", "after_position", type=Count(0), default=0, help="Start with the events after this position.")
@click.option(
    "--patience", "patience_s", type=Number(0), default=300.0, help="Seconds to wait for the run or the syncer."
)
@as_json
@with_client
def watch(client: RunsClient, *, run: str, once: bool, after_position: int, patience_s: float, is_json: bool) -> None:
    """Follow a run: its learners, fragments, versions, staleness, bandwidth and loss.

    In a terminal this is a live table. In a pipe it prints one line per event, and with --json one JSON object per
    message, beginning with the current state of the run. It ends when the run is closed.
    """
    if once:
        answer = client.get_run(run)
        if is_json:
            click.echo(json_line(to_values(answer)))
        else:
            console().print(draw(state_now(client, answer)))
        return
    state, screen = WatchState(), console()
    with ExitStack() as stack:
        live: Live | None = None
        if screen.is_terminal and not is_json:
            live = stack.enter_context(Live(draw(state), console=screen, refresh_per_second=_REDRAWS_PER_S))

        def tell(notice: str) -> None:
            if live is None:
                click.echo(notice, err=True)
            else:
                live.update(draw(state, notice=notice))

        for message in follow(client, run, after_position=after_position, patience_s=patience_s, tell=tell):
            text = state.apply(message, time.monotonic())
            if is_json:
                key = "event" if isinstance(message, Event) else "start"
                click.echo(json_line({key: to_values(message)}))
            elif live is not None:
                live.update(draw(state))
            elif isinstance(message, Event) and text:
                click.echo(f"{message.position} {message.WhichOneof('kind')}: {text}")
    if state.status == v1.RUN_STATUS_CLOSED and not is_json:
        click.echo(f"{run} is closed at position {state.position}")


def follow(
    client: RunsClient,
    run: str,
    *,
    after_position: int = 0,
    patience_s: float = 300.0,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
    tell: Callable[[str], None] = lambda _: None,
) -> Iterator[WatchStart | Event]:
    """Yields every message until the run is closed; after a broken stream it continues at the last position seen.

    `tell` hears why a stream broke, once for each new reason.

    Raises:
        SkerryError: the call was refused, or nothing was received for longer than `patience_s`; meanwhile a run that
            does not exist may be created.
    """
    heard_at_s, has_started, attempt, notice = clock(), False, 0, ""
    while True:
        try:
            for message in client.watch(run, after_position=after_position):
                heard_at_s, has_started, attempt, notice = clock(), True, 0, ""
                yield message
                if isinstance(message, Event):
                    after_position = max(after_position, message.position)
                    is_over = message.status_changed == v1.RUN_STATUS_CLOSED
                else:  # a closed run that was asked for its past has yet to tell it
                    is_closed = message.run.status == v1.RUN_STATUS_CLOSED
                    is_over = is_closed and not 0 < after_position < message.run.position
                if is_over:
                    return
            raise error_of("UNREACHABLE", "the syncer ended the stream")  # as a replica does that drains
        except SkerryError as error:
            is_missing = isinstance(error, RunNotFoundError) and not has_started
            if not (is_missing or is_transient(error)) or clock() - heard_at_s > patience_s:
                raise
            attempt += 1
            if (reason := f"{'waiting' if is_missing else 'reconnecting'}: {error}") != notice:
                tell(reason)
            notice = reason
            wait(_PAUSES.wait_s(attempt, error, system_random()))
