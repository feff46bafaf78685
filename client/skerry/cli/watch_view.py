"""What `skerry watch` shows of a run: learners, fragments, and the last events."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from skerry.cli.console import count_text, rate_text, size_text, table
from skerry.history.alerts import Severity, alerts
from skerry.history.run_history import (
    FragmentView,
    LearnerView,
    RunHistory,
    learner_state,
    status_word,
    unmerged_text,
)

_BARS = "▁▂▃▄▅▆▇█"
_EVENT_COUNT: Final = 10
_LOSS_COUNT: Final = 24  # the width of a sparkline
_ALERT_STYLES: Final = {Severity.CRITICAL: "bold red", Severity.WARNING: "yellow"}
_STATE_STYLES = {"participating": "green", "live": "yellow", "finished": "cyan", "lost": "red", "ejected": "red"}


def draw(state: RunHistory, *, notice: str = "", now_s: float | None = None) -> RenderableType:
    """Returns the whole view; `notice` says what is wrong with the connection, if anything.

    With the time `now_s`, since 1970, it begins with what is wrong with the run.
    """
    fragments = table([_fragment(name, view) for name, view in state.fragments.items()])
    wrong = [] if now_s is None else alerts(state, now_s)
    judged = [
        Text(f"{metric} {series.last.value:.4f} of the merged model, by {judge}", style="magenta")
        for (judge, metric), series in sorted(state.metrics.items())
        if series.last is not None
    ]
    warnings = [Text(alert.summary, style=_ALERT_STYLES[alert.severity]) for alert in wrong]
    parts: list[RenderableType] = [_headline(state, notice), *warnings, *judged, "", _learners(state), "", fragments]
    if state.events:
        newest = list(islice(reversed(state.events), _EVENT_COUNT))[::-1]
        parts += ["", table([{"position": str(event.position), "event": event.text} for event in newest])]
    return Group(*parts, Text("columns: skerry watch --help", style="dim"))


def _headline(state: RunHistory, notice: str) -> Text:
    line = Text.assemble((state.name, "bold"), f"  {status_word(state.status)}  position {state.position}")
    live, _, taking_part = state.learner_counts()
    line.append(f"  {live} live, {taking_part} participating")
    if notice:
        line.append(f"  {notice}", style="bold red")
    return line


def _learners(state: RunHistory) -> RenderableType:
    if not state.learners:
        return Text("no learners yet", style="dim")
    views = [view for _, view in sorted(state.learners.items())]
    unmerged = [(view.status.learner_id, unmerged_text(view.status.fates)) for view in views]
    return Group(
        table([_learner(state, view) for view in views]),
        *(Text(f"{name}: {text}", style="red") for name, text in unmerged if text),
    )


def _learner(state: RunHistory, view: LearnerView) -> dict[str, str | Text]:
    status, report = view.status, view.status.report
    state_name = learner_state(status)
    behind, (up, down) = state.staleness(view), view.bits_per_s or (None, None)
    return {
        "learner": status.learner_id,
        "region": status.region or "-",
        "state": Text(state_name, style=_STATE_STYLES[state_name]),
        "step": str(report.step_count),
        "tokens": count_text(report.token_count),
        "step time": f"{report.step_time.ToMilliseconds()} ms",
        "loss": f"{report.loss:.4f}" if report.HasField("loss") else "-",
        "trend": Text(sparkline([point.value for point in view.losses][-_LOSS_COUNT:]), style="cyan"),
        "up": rate_text(up),
        "down": rate_text(down),
        "behind": "-" if behind is None else str(behind),
        "stall": f"{report.stall_time.ToMilliseconds()} ms",
        "unsent": str(report.unsent_step_count),
        "dropped": str(report.dropped_step_count),
        "problem": Text(report.problem, style="bold red"),
    }


def _fragment(name: str, view: FragmentView) -> dict[str, str | Text]:
    last = view.last
    return {
        "fragment": name,
        "elements": count_text(view.element_count),
        "version": str(view.version),
        "deltas": str(last.delta_count) if last else "-",
        "staleness": str(last.staleness) if last else "-",
        "participation": f"{last.participation:.0%}" if last else "-",
        "update": size_text(last.update_size_bytes) if last else "-",
        "round": Text("" if view.open_version is None else f"gathering {view.open_version}", style="yellow"),
    }


def sparkline(values: Iterable[float]) -> str:
    """Returns values as a row of bars, scaled between their lowest and highest; empty for fewer than two."""
    points = list(values)
    if len(points) < 2:
        return ""
    low, high = min(points), max(points)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((point - low) * scale)] for point in points)
