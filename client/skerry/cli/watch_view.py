"""What `skerry watch` shows of a run: learners, fragments, and the last events."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.text import Text

from skerry.cli.console import count_text, rate_text, size_text, table
from skerry.cli.watch_state import FragmentView, LearnerView, WatchState, learner_state, status_word, unmerged_text

_BARS = "▁▂▃▄▅▆▇█"
_STATE_STYLES = {"participating": "green", "live": "yellow", "finished": "cyan", "lost": "red"}


def draw(state: WatchState, *, notice: str = "", event_count: int = 10) -> RenderableType:
    """Returns the whole view; `notice` says what is wrong with the connection, if anything."""
    parts: list[RenderableType] = [_headline(state, notice), "", _learners(state)]
    parts += [
        Text(f"{name}: {text}", style="red")
        for name in sorted(state.learners)
        if (text := unmerged_text(state.learners[name].status.fates))
    ]
    parts += ["", _fragments(state)]
    if state.events and event_count:
        parts += ["", _events(state, event_count)]
    return Group(*parts, Text("columns: skerry watch --help", style="dim"))


def _headline(state: WatchState, notice: str) -> Text:
    line = Text.assemble((state.name, "bold"), f"  {status_word(state.status)}  position {state.position}")
    live = sum(view.status.is_live for view in state.learners.values())
    taking_part = sum(view.status.is_live and view.status.is_participating for view in state.learners.values())
    line.append(f"  {live} live, {taking_part} participating")
    if notice:
        line.append(f"  {notice}", style="bold red")
    return line


def _learners(state: WatchState) -> RenderableType:
    rows = table(
        "learner", "region", "state", "step", "tokens", "step time", "loss", "", "up", "down", "behind", "stall",
        "unsent", "dropped", "",
        right=("step", "tokens", "step time", "loss", "up", "down", "behind", "stall", "unsent", "dropped"),
    )  # fmt: skip
    for name in sorted(state.learners):
        rows.add_row(*_learner(state, state.learners[name]))
    return rows if rows.row_count else Text("no learners yet", style="dim")


def _learner(state: WatchState, view: LearnerView) -> Iterable[Text | str]:
    status, report = view.status, view.status.report
    word = learner_state(status)
    behind = state.staleness(view)
    yield status.learner_id
    yield status.region or "-"
    yield Text(word, style=_STATE_STYLES[word])
    yield str(report.step_count)
    yield count_text(report.token_count)
    yield f"{report.step_time.ToMilliseconds()} ms"
    yield f"{report.loss:.4f}" if report.HasField("loss") else "-"
    yield Text(sparkline(view.losses), style="cyan")
    yield rate_text(view.up_bits_per_s)
    yield rate_text(view.down_bits_per_s)
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
    for view in state.fragments.values():
        rows.add_row(*_fragment(view))
    return rows


def _fragment(view: FragmentView) -> Iterable[Text | str]:
    is_known = view.participation is not None
    yield view.name
    yield str(view.version)
    yield str(view.contributor_count) if is_known else "-"
    yield str(view.max_staleness) if is_known else "-"
    yield f"{view.participation:.0%}" if is_known else "-"
    yield size_text(view.update_size_bytes) if is_known else "-"
    yield Text("" if view.open_version is None else f"gathering {view.open_version}", style="yellow")


def _events(state: WatchState, count: int) -> RenderableType:
    rows = table("position", "event", right=("position",))
    for line in list(state.events)[-count:]:
        rows.add_row(str(line.position), line.text)
    return rows


def sparkline(values: Iterable[float]) -> str:
    """Returns values as a row of bars, scaled between their lowest and highest; empty for fewer than two."""
    points = list(values)
    if len(points) < 2:
        return ""
    low, high = min(points), max(points)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((point - low) * scale)] for point in points)
