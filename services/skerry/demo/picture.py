"""One picture of the whole demo: what was learned, what was killed, what moved, and who waited."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from skerry.demo.summary import MAX_BITS_DOWN, MAX_BITS_UP, MAX_STALL_MS, Evidence, Summary

_INK: Final = "#1d2733"
_FAINT: Final = "#8a96a3"
_GRID: Final = "#e6eaee"
_MERGED: Final = "#c2255c"
_SINGLE: Final = "#5c6773"
_ISLANDS: Final = ("#1c7ed6", "#0ca678", "#f08c00", "#7048e8")
_OUTAGE: Final = "#fa5252"
_FLOAT32_BITS: Final = 32.0

STYLE: Final[dict[Any, Any]] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": _INK,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": _GRID,
    "axes.axisbelow": True,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "legend.frameon": False,
}
"""How this project's pictures look, as matplotlib has it."""


def draw(evidence: Evidence, summary: Summary, path: Path) -> None:
    """Draw the picture to `path`, a PNG."""
    with mpl.rc_context(STYLE):
        figure = plt.figure(figsize=(12.5, 13.2), dpi=144)
        grid = figure.add_gridspec(3, 2, height_ratios=(2.2, 1.15, 1.0), hspace=0.36, wspace=0.2)
        figure.subplots_adjust(left=0.115, right=0.965, top=0.895, bottom=0.055)
        losses = figure.add_subplot(grid[0, :])
        exchange = figure.add_subplot(grid[1, :], sharex=losses)
        _draw_title(figure, summary)
        _draw_losses(losses, evidence, summary)
        _draw_exchange(exchange, evidence)
        _draw_bits(figure.add_subplot(grid[2, 0]), summary)
        _draw_stalls(figure.add_subplot(grid[2, 1], sharex=losses), evidence, summary)
        figure.savefig(path, facecolor="white")
        plt.close(figure)


def _draw_title(figure: Figure, summary: Summary) -> None:
    figure.text(
        0.115,
        0.962,
        f"Three islands learn one model: loss {summary.merged_loss:.3f} together, {summary.single_loss:.3f} alone",
        fontsize=17,
        fontweight="bold",
    )
    figure.text(
        0.115,
        0.94,
        f"{summary.parameter_count / 1e6:.2f}M parameters, {summary.tokens_per_learner / 1e6:.2f}M tokens an island at "
        f"full speed. A learner and the syncer were killed on the way (SIGKILL). "
        f"{summary.versions_committed} versions, {summary.deltas_merged} deltas merged.",
        fontsize=10,
        color=_SINGLE,
    )


def _draw_losses(axes: Axes, evidence: Evidence, summary: Summary) -> None:
    axes.set_title("Loss on held-out text, nats a byte")
    end_s = _end_s(evidence)
    ends: list[tuple[float, str, str]] = []
    for index, island in enumerate(evidence.plan.islands):
        follower = evidence.learners[island.learner_id]
        colour = _ISLANDS[index % len(_ISLANDS)]
        slow = f", {island.slowdown:.0f}x slower" if island.slowdown > 1 else ""
        label = f"{island.learner_id}{slow}"
        evaluated = list(follower.evaluations)
        for attempt in sorted({line.attempt for line, _ in evaluated}):
            times_s = [evidence.since_start_s(line.unix_s) for line, _ in evaluated if line.attempt == attempt]
            values = [loss for line, loss in evaluated if line.attempt == attempt]
            axes.plot(times_s, values, color=colour, lw=1.5, label=label, alpha=0.9, marker=".", ms=4)
            label = "_" + label
    single_times_s, single_values = _single_curve(evidence)
    axes.plot(
        single_times_s, single_values, color=_SINGLE, lw=2.2, ls=(0, (5, 2)), label="one learner alone, same tokens"
    )
    times_s = [0.0, *(evidence.since_start_s(judged.unix_s) for judged in evidence.merged)]
    values = [evidence.initial_loss, *(judged.loss for judged in evidence.merged)]
    axes.plot(times_s, values, color=_MERGED, lw=2.8, marker="o", ms=5.5, mec="white", mew=1.0, label="merged model")
    ends += [(summary.single_loss, f"alone {summary.single_loss:.3f}", _SINGLE)]
    ends += [(summary.merged_loss, f"merged {summary.merged_loss:.3f}", _MERGED)]
    # The first moments of a byte model, down from 5.5, would flatten everything that is worth seeing.
    low = min(summary.merged_loss, *values[1:])
    high = min(max([*single_values[:1], *values[1:2]], default=evidence.initial_loss) + 0.3, evidence.initial_loss)
    axes.set_ylim(low - 0.08 * (high - low), high)
    axes.set_xlim(0, end_s * 1.115)
    # Labels keep a line's height between them, however near the two losses are.
    middle = (summary.single_loss + summary.merged_loss) / 2
    least_gap = 0.045 * (axes.get_ylim()[1] - axes.get_ylim()[0])
    for value, text, colour in ends:
        away = math.copysign(max(abs(value - middle), least_gap / 2), value - middle)
        axes.text(end_s * 1.012, middle + away, text, color=colour, fontweight="bold", va="center")
    gap = summary.single_loss - summary.merged_loss
    if gap > 0:
        axes.fill_between(
            [end_s * 0.988, end_s],
            summary.merged_loss,
            summary.single_loss,
            color=_MERGED,
            alpha=0.18,
            lw=0,
        )
    axes.legend(loc="upper right", bbox_to_anchor=(1.005, 1.01))
    axes.set_xlabel("seconds since the islands' first step")
    _shade_outages(axes, evidence, is_labelled=True)


def _draw_exchange(axes: Axes, evidence: Evidence) -> None:
    axes.set_title("What moved, as the log has it: deltas up from each island, versions of each fragment down")
    rows: list[tuple[str, str, list[float]]] = []
    history = evidence.history
    for fragment in sorted(history.state.fragments, reverse=True):
        positions = [version.position for version in history.versions if version.item.fragment == fragment]
        times_s = [evidence.since_start_s(history.unix_s[position]) for position in positions]
        rows.append((f"{fragment}  ↓", _MERGED, times_s))
    for index, island in reversed(list(enumerate(evidence.plan.islands))):
        positions = [delta.position for delta in history.deltas if delta.item.learner == island.learner_id]
        times_s = [evidence.since_start_s(history.unix_s[position]) for position in positions]
        rows.append((f"{island.learner_id}  ↑", _ISLANDS[index % len(_ISLANDS)], times_s))
    end_s = _end_s(evidence)
    for row, (_, colour, times_s) in enumerate(rows):
        axes.eventplot(times_s, lineoffsets=row, linelengths=0.62, linewidths=1.3, colors=colour)
        axes.text(end_s * 1.012, row, str(len(times_s)), va="center", color=colour, fontweight="bold")
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    _shade_outages(axes, evidence, is_labelled=False)


def _draw_bits(axes: Axes, summary: Summary) -> None:
    axes.set_title("Bits for each parameter and synchronisation")
    rows = [
        (summary.bits_per_parameter_down, MAX_BITS_DOWN, _ISLANDS[3]),
        (summary.bits_per_parameter_up, MAX_BITS_UP, _MERGED),
    ]
    axes.barh([2], [_FLOAT32_BITS], color=_GRID, height=0.55)
    axes.text(_FLOAT32_BITS - 0.6, 2, "32, as float32 would be", va="center", ha="right", color=_SINGLE)
    for position, (bits, limit, colour) in enumerate(rows):
        axes.barh([position], [bits], color=colour, height=0.55)
        axes.plot([limit, limit], [position - 0.36, position + 0.36], color=_INK, lw=1.6)
        axes.text(max(bits, limit) + 0.6, position, f"{bits:.2f}", va="center", fontweight="bold", color=colour)
        axes.text(max(bits, limit) + 4.0, position, f"limit {limit:.0f}", va="center", color=_FAINT, fontsize=9)
    axes.set_yticks([0, 1, 2], ["down", "up", "raw"])
    axes.set_xlim(0, _FLOAT32_BITS)
    axes.grid(visible=False, axis="y")


def _draw_stalls(axes: Axes, evidence: Evidence, summary: Summary) -> None:
    axes.set_title("Pause of each training step by synchronisation, ms")
    for index, island in enumerate(evidence.plan.islands):
        lines = evidence.learners[island.learner_id].lines
        axes.scatter(
            [evidence.since_start_s(line.unix_s) for line in lines],
            [max(line.sync_stall_ms, 1e-3) for line in lines],
            s=5,
            color=_ISLANDS[index % len(_ISLANDS)],
            alpha=0.55,
            lw=0,
        )
    axes.set_yscale("log")
    top = max(MAX_STALL_MS, summary.max_step_stall_ms) * 4
    axes.set_ylim(
        _lowest(line.sync_stall_ms for follower in evidence.learners.values() for line in follower.lines), top
    )
    axes.axhline(MAX_STALL_MS, color=_INK, lw=1.2, ls=(0, (2, 2)))
    axes.text(0, MAX_STALL_MS * 1.15, f" limit {MAX_STALL_MS:.0f} ms", color=_INK, fontsize=9, va="bottom")
    axes.annotate(
        f"longest {summary.max_step_stall_ms:.1f} ms",
        (summary.max_step_stall_at_s, summary.max_step_stall_ms),
        xytext=(-8, 0) if summary.max_step_stall_at_s > _end_s(evidence) / 2 else (8, 0),
        textcoords="offset points",
        va="center",
        ha="right" if summary.max_step_stall_at_s > _end_s(evidence) / 2 else "left",
        fontweight="bold",
        color=_MERGED,
    )
    axes.scatter([summary.max_step_stall_at_s], [summary.max_step_stall_ms], s=46, fc="none", ec=_MERGED, lw=1.6)
    axes.set_xlabel("seconds since the islands' first step")
    _shade_outages(axes, evidence, is_labelled=False)


def _shade_outages(axes: Axes, evidence: Evidence, *, is_labelled: bool) -> None:
    timeline, plan = evidence.timeline, evidence.plan
    index = [island.learner_id for island in plan.islands].index(plan.killed_learner_id)
    outages = [
        (timeline.learner_killed, timeline.learner_back, _ISLANDS[index], f"{plan.killed_learner_id} killed"),
        (timeline.syncer_killed, timeline.syncer_back, _OUTAGE, "syncer killed"),
    ]
    for killed, back, colour, text in outages:
        first_s, last_s = evidence.since_start_s(killed), evidence.since_start_s(back)
        axes.axvspan(first_s, last_s, color=colour, alpha=0.13, lw=0, zorder=0)
        axes.axvline(first_s, color=colour, lw=1.4, alpha=0.8, zorder=1)
        axes.axvline(last_s, color=colour, lw=1.0, ls=(0, (3, 2)), alpha=0.8, zorder=1)
        if is_labelled:
            axes.annotate(
                f"{text}\nback after {last_s - first_s:.1f} s",
                (first_s, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(5, -5),
                textcoords="offset points",
                va="top",
                fontsize=9.5,
                color=colour,
                fontweight="bold",
            )


def _single_curve(evidence: Evidence) -> tuple[list[float], list[float]]:
    """The single learner's losses, each at the time at which the first island had taken as many steps."""
    timekeeper = evidence.learners[evidence.plan.timekeeper.learner_id]
    times_by_step = {line.step: evidence.since_start_s(line.unix_s) for line in timekeeper.lines}
    points = [
        (times_by_step[line.step], loss) for line, loss in evidence.single.evaluations if line.step in times_by_step
    ]
    return [time_s for time_s, _ in points], [loss for _, loss in points]


def _end_s(evidence: Evidence) -> float:
    return evidence.since_start_s(evidence.timeline.closed)


def _lowest(values: Iterable[float]) -> float:
    positive = [value for value in values if value > 0]
    return 10.0 ** math.floor(math.log10(max(min(positive, default=1e-2), 1e-3)))
