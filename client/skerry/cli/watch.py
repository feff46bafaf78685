"""`skerry watch`: shows a run live in a terminal, or as lines for a script."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Final

import click
from rich.live import Live

from skerry import RunsClient
from skerry.cli.connection import with_client, with_run
from skerry.cli.console import as_json, console, json_line
from skerry.cli.watch_view import draw
from skerry.history.following import follow
from skerry.history.run_history import RunHistory
from skerry.runtime.options import Count, Number
from skerry.v1 import types_pb2 as v1
from skerry.v1.types_pb2 import Event
from skerry.wire.messages import to_values

_REDRAWS_PER_S: Final = 4


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
  skerry watch demo --json --after 1 | jq -c 'select(.event.version_committed)'
""",
)
@with_run
@click.option("--after", "after_position", type=Count(0), default=0, help="Start with the events after this position.")
@click.option(
    "--patience", "patience_s", type=Number(0), default=300.0, help="Seconds to wait for the run or the syncer."
)
@as_json
@with_client
def watch(client: RunsClient, *, run: str, after_position: int, patience_s: float, is_json: bool) -> None:
    """Follow a run: its learners, fragments, versions, staleness, bandwidth and loss.

    In a terminal this is a live table. In a pipe it prints one line per event, and with --json one JSON object per
    message, beginning with the current state of the run. It ends when the run is closed.
    `skerry runs show` shows the same once.
    """
    state, screen = RunHistory(), console()
    with ExitStack() as stack:
        live: Live | None = None
        if screen.is_terminal and not is_json:
            live = stack.enter_context(Live(draw(state), console=screen, refresh_per_second=_REDRAWS_PER_S))

        def tell(notice: str) -> None:
            if live is None:
                click.echo(notice, err=True)
            else:
                live.update(draw(state, notice=notice, now_s=time.time()))

        for message in follow(client, run, after_position=after_position, patience_s=patience_s, tell=tell):
            text = state.apply(message, time.time())
            if is_json:
                key = "event" if isinstance(message, Event) else "start"
                click.echo(json_line({key: to_values(message)}))
            elif live is not None:
                live.update(draw(state, now_s=time.time()))
            elif isinstance(message, Event) and text:
                click.echo(f"{message.position} {message.WhichOneof('kind')}: {text}")
    if state.status == v1.RUN_STATUS_CLOSED and not is_json:
        click.echo(f"{run} is closed at position {state.position}")
