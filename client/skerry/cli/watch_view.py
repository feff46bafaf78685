"""What `skerry watch` shows of a run: learners, fragments, and the last events."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.text import Text

from skerry.cli.console import count_text, rate_text, size_text, table
from skerry.cli.watch_state import LearnerView, WatchState, learner_state, status_word, unmerged_text

_BARS = "▁▂▃▄▅▆▇█"
_STATE_STYLES = {"participating": "green", "live": "yellow", "finished": "cyan", "lost": "red"}


def draw(state: WatchState, *, notice: str = "") -> RenderableType:
    """Returns the whole view; `notice` says what is wrong with the connection, if anything."""
    parts: list[RenderableType] = [_headline(state, notice), "", learners(state), "", _fragments(state)]
    if state.events:
        rows = table("position", "event", right=("position",))
        for position, text in state.events:
            rows.add_row(str(position), text)
        parts += ["", rows]
    return Group(*parts, Text("columns: skerry watch --help", style="dim"))


def _headline(state: WatchState, notice: str) -> Text:
    line = Text.assemble((state.name, "bold"), f"  {status_word(state.status)}  position {state.position}")
    live = sum(view.status.is_live for view in state.learners.values())
    taking_part = sum(view.status.is_live and view.status.is_participating for view in state.learners.values())
    line.append(f"  {live} live, {taking_part} participating")
    if notice:
        line.append(f"  {notice}", style="bold red")
    return line


def learners(state: WatchState) -> RenderableType:
    """Returns a table of the learners, and which of their deltas were not merged."""
    if not state.learners:
        return Text("no learners yet", style="dim")
    rows = table(
        "learner", "region", "state", "step", "tokens", "step time", "loss", "", "up", "down", "behind", "stall",
        "unsent", "dropped", "",
        right=("step", "tokens", "step time", "loss", "up", "down", "behind", "stall", "unsent", "dropped"),
    )  # fmt: skip
    losses: list[Text] = []
    for name, view in sorted(state.learners.items()):
        rows.add_row(*_learner(state, view))
        if unmerged := unmerged_text(view.status.fates):
            losses.append(Text(f"{name}: {unmerged}", style="red"))
    return Group(rows, *losses)


def _learner(state: WatchState, view: LearnerView) -> Iterable[Text | str]:
    status, report = view.status, view.status.report
    word = learner_state(status)
    behind, rates = state.staleness(view), view.bits_per_s or (None, None)
    yield status.learner_id
    yield status.region or "-"
    yield Text(word, style=_STATE_STYLES[word])
    yield str(report.step_count)
    yield count_text(report.token_count)
    yield f"{report.step_time.ToMilliseconds()} ms"
    yield f"{report.loss:.4f}" if report.HasField("loss") else "-"
    yield Text(sparkline(view.losses), style="cyan")
    yield from map(rate_text, rates)
    yield "-" if behind is None else str(behind)
    yield f"{report.stall_time.ToMilliseconds()} ms"
    yield str(report.unsent_step_count)
    yield str(report.dropped_step_count)
    yield Text(report.problem, style="bold red")


def _fragments(state: WatchState) -> RenderableType:
    rows = table(
        "fragment", "version", "deltas", "staleness", "participation", "update", "round",
        right=("version", "deltas", "staleness", "participation", "update"),
    )  # fmt: skip
    for name, view in state.fragments.items():
        made = ["-", "-", "-", "-"]
        if (committed := view.committed) is not None:
            staleness = max((delta.staleness for delta in committed.merged), default=0)
            made = [str(len(committed.merged)), str(staleness), f"{committed.participation:.0%}"]
            made.append(size_text(committed.update_size_bytes))
        gathering = "" if view.open_version is None else f"gathering {view.open_version}"
        rows.add_row(name, str(view.version), *made, Text(gathering, style="yellow"))
    return rows


def sparkline(values: Iterable[float]) -> str:
    """Returns values as a row of bars, scaled between their lowest and highest; empty for fewer than two."""
    points = list(values)
    if len(points) < 2:
        return ""
    low, high = min(points), max(points)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((point - low) * scale)] for point in points)
