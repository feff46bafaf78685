"""The progress of the demo: a live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from skerry_demo.follow import MetricsFollower
from skerry_demo.scenario import Scenario

_REFRESH_S: Final = 0.25
_LINE_EVERY_S: Final = 10.0
_SPARK: Final = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH: Final = 16


class LiveView:
    """Shows a scenario on a console; a context manager. A pipe or a log file gets a line every ten seconds."""

    def __init__(self, console: Console) -> None:
        """Show on `console`."""
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._shown_at_s = 0.0
        self._event_count = 0

    def refresh(self, scenario: Scenario) -> None:
        """Show the progress of `scenario`, at most a few times a second; call it as often as you like."""
        now_s = time.monotonic()
        events = list(scenario.timeline.events.values())
        is_new = len(events) > self._event_count
        if not is_new and now_s - self._shown_at_s < (_LINE_EVERY_S if self._live is None else _REFRESH_S):
            return
        self._shown_at_s = now_s
        if self._live is not None:
            self._live.update(_screen(scenario), refresh=True)
        else:
            for event in events[self._event_count :]:
                self._console.print(event.text, highlight=False)
            self._console.print(_line(scenario), highlight=False, soft_wrap=True)
        self._event_count = len(events)

    def __enter__(self) -> Self:
        """Take over the terminal."""
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop updating; the last table stays on the terminal."""
        if self._live is not None:
            self._live.stop()


def _screen(scenario: Scenario) -> RenderableType:
    plan = scenario.plan
    is_single = "started" not in scenario.timeline.events
    step = scenario.single.step if is_single else scenario.learners[plan.timekeeper.learner_id].step
    bar = Table.grid(padding=(0, 2))
    bar.add_row(ProgressBar(total=plan.step_count, completed=step, width=48), f"step {step} of {plan.step_count}")
    timeline = scenario.timeline
    events = [_event_text(timeline.since_start_s(event.unix_s), event.text) for event in timeline.events.values()]
    return Panel(Group(bar, Text(), _table(scenario), Text(), *events), title=f"skerry demo · {scenario.phase}")


def _event_text(since_s: float, text: str) -> Text:
    style = "bold red" if "SIGKILL" in text else "green"
    return Text.assemble((f"{since_s:6.1f} s  ", "dim"), (text, style))


def _table(scenario: Scenario) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("", "step", "ms", "pause", "version", "up MB", "down", "held-out loss"):
        table.add_column(title, justify="left" if title in {"", "held-out loss"} else "right", no_wrap=True)
    table.add_row(*_row("single", scenario.single, is_killed=False))
    for name, follower in scenario.learners.items():
        table.add_row(*_row(name, follower, is_killed=name in scenario.killed))
    is_serving = "started" in scenario.timeline.events
    table.add_row("syncer", Text("killed", "bold red") if "syncer" in scenario.killed else "up" if is_serving else "")
    return table


def _row(name: str, follower: MetricsFollower, *, is_killed: bool) -> list[RenderableType]:
    if not follower.lines:
        return [name, "starting"]
    line = follower.lines[-1]
    evaluated = [loss for _, loss in follower.evaluations]
    return [
        Text(name, "bold red" if is_killed else ""),
        Text("killed", "bold red") if is_killed else str(line.step),
        f"{line.step_time_ms + line.slowdown_ms:.0f}",
        f"{line.sync_stall_ms:.1f}",
        _versions(line.versions, is_attached=line.is_attached),
        f"{line.bytes_up / 1e6:.2f}",
        f"{line.bytes_down / 1e6:.2f}",
        f"{_spark(evaluated)} {evaluated[-1]:.3f}" if evaluated else "",
    ]


def _versions(versions: Mapping[str, int], *, is_attached: bool) -> str:
    """The versions held, with a question mark while there is no connection that would announce newer ones."""
    if not versions:
        return ""
    low, high = min(versions.values()), max(versions.values())
    span = f"{low}" if low == high else f"{low}-{high}"
    return span if is_attached else f"{span}?"


def _spark(values: list[float]) -> str:
    # Square roots show small changes: a loss falls steeply at first and slowly later.
    shown = values[-_SPARK_WIDTH:]
    low, high = min(shown), max(shown)
    span = (high - low) or 1.0
    return "".join(_SPARK[round(((value - low) / span) ** 0.5 * (len(_SPARK) - 1))] for value in shown)


def _line(scenario: Scenario) -> str:
    parts = [
        f"{name} {'killed' if name in scenario.killed else follower.step}"
        for name, follower in (("single", scenario.single), *scenario.learners.items())
        if follower.lines
    ]
    return f"{scenario.phase}: {', '.join(parts) or 'starting'}"
