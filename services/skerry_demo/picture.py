"""One picture of the demo: losses, kills, what was sent when, bits per parameter, and pauses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from skerry_demo.scenario import Moment
from skerry_demo.summary import MAX_BITS_DOWN, MAX_BITS_UP, MAX_STALL_MS, Evidence, Summary

_INK: Final = "#1d2733"
_FAINT: Final = "#8a96a3"
_GRID: Final = "#e6eaee"
_MERGED: Final = "#c2255c"
_SINGLE: Final = "#5c6773"
_DOWN: Final = "#7048e8"
_LEARNERS: Final = ("#1c7ed6", "#0ca678", "#f08c00")
_SYNCER: Final = "#fa5252"
_FLOAT32_BITS: Final = 32.0
_TIME_LABEL: Final = "seconds since the learners' first step"

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
"""The style of this project's pictures, as matplotlib settings."""


def draw(evidence: Evidence, summary: Summary, path: Path) -> None:
    """Draw the picture to `path`, a PNG."""
    with mpl.rc_context(STYLE):
        figure = plt.figure(figsize=(12.5, 13.2), dpi=144)
        grid = figure.add_gridspec(3, 2, height_ratios=(2.2, 1.15, 1.0), hspace=0.36, wspace=0.2)
        figure.subplots_adjust(left=0.115, right=0.965, top=0.895, bottom=0.055)
        losses = figure.add_subplot(grid[0, :])
        _draw_title(figure, summary)
        _draw_losses(losses, evidence, summary)
        _draw_exchange(figure.add_subplot(grid[1, :], sharex=losses), evidence, summary)
        _draw_bits(figure.add_subplot(grid[2, 0]), summary)
        _draw_stalls(figure.add_subplot(grid[2, 1], sharex=losses), evidence, summary)
        figure.savefig(path, facecolor="white")
        plt.close(figure)


def _draw_title(figure: Figure, summary: Summary) -> None:
    title = f"Three learners train one model: loss {summary.merged_loss:.3f} together, {summary.single_loss:.3f} alone"
    figure.text(0.115, 0.962, title, fontsize=17, fontweight="bold")
    facts = (
        f"{summary.parameter_count / 1e6:.2f}M parameters, {summary.tokens_per_learner / 1e6:.2f}M tokens for each "
        f"learner at full speed. A learner and the syncer were killed with SIGKILL. "
        f"{summary.versions_committed} versions, {summary.deltas_merged} deltas merged."
    )
    figure.text(0.115, 0.94, facts, fontsize=10, color=_SINGLE)


def _draw_losses(axes: Axes, evidence: Evidence, summary: Summary) -> None:
    axes.set_title("Loss on held-out text, nats a byte")
    timeline = evidence.timeline
    for learner, colour in zip(evidence.plan.learners, _LEARNERS, strict=True):
        label = learner.learner_id + (f", {learner.slowdown:.0f}x slower" if learner.slowdown > 1 else "")
        evaluated = list(evidence.learners[learner.learner_id].evaluations)
        for attempt in sorted({line.attempt for line, _ in evaluated}):
            times_s = [timeline.since_start_s(line.unix_s) for line, _ in evaluated if line.attempt == attempt]
            values = [loss for line, loss in evaluated if line.attempt == attempt]
            axes.plot(times_s, values, color=colour, lw=1.5, label=label, alpha=0.9, marker=".", ms=4)
            label = "_" + label  # a curve in parts has one entry in the legend
    single_times_s, single = _single_curve(evidence)
    axes.plot(single_times_s, single, color=_SINGLE, lw=2.2, ls=(0, (5, 2)), label="single learner, same tokens")
    times_s = [0.0, *(timeline.since_start_s(judged.unix_s) for judged in evidence.merged)]
    values = [evidence.initial_loss, *(judged.loss for judged in evidence.merged)]
    axes.plot(times_s, values, color=_MERGED, lw=2.8, marker="o", ms=5.5, mec="white", mew=1.0, label="merged model")
    # The top of the axis cuts off the first steps from 5.5 down, which would flatten everything below.
    low = min(values)
    high = min(max([*single[:1], *values[1:2]], default=evidence.initial_loss) + 0.3, evidence.initial_loss)
    axes.set_ylim(low - 0.08 * (high - low), high)
    axes.set_xlim(0, summary.closed_at_s * 1.115)
    _label_final_losses(axes, summary)
    axes.legend(loc="upper right", bbox_to_anchor=(1.005, 1.01))
    axes.set_xlabel(_TIME_LABEL)
    _shade_outages(axes, evidence, is_labelled=True)


def _label_final_losses(axes: Axes, summary: Summary) -> None:
    end_s, single, merged = summary.closed_at_s, summary.single_loss, summary.merged_loss
    low, high = axes.get_ylim()
    middle = (single + merged) / 2
    for value, text, colour in ((single, f"alone {single:.3f}", _SINGLE), (merged, f"merged {merged:.3f}", _MERGED)):
        # Labels are at least a line's height apart, also where the two losses are closer.
        away = math.copysign(max(abs(value - middle), 0.0225 * (high - low)), value - middle)
        axes.text(end_s * 1.012, middle + away, text, color=colour, fontweight="bold", va="center")
    if single > merged:
        axes.fill_between([end_s * 0.988, end_s], merged, single, color=_MERGED, alpha=0.18, lw=0)


def _draw_exchange(axes: Axes, evidence: Evidence, summary: Summary) -> None:
    axes.set_title("What was sent, from the run's log: deltas up from each learner, versions of each fragment down")
    history = evidence.history
    rows: list[tuple[str, str, list[int]]] = []
    for fragment in sorted(history.state.fragments, reverse=True):
        positions = [version.position for version in history.versions if version.item.fragment == fragment]
        rows.append((f"{fragment}  ↓", _MERGED, positions))
    for learner, colour in reversed(list(zip(evidence.plan.learners, _LEARNERS, strict=True))):
        positions = [delta.position for delta in history.deltas if delta.item.learner == learner.learner_id]
        rows.append((f"{learner.learner_id}  ↑", colour, positions))
    for row, (_, colour, positions) in enumerate(rows):
        times_s = [evidence.timeline.since_start_s(history.unix_s[position]) for position in positions]
        axes.eventplot(times_s, lineoffsets=row, linelengths=0.62, linewidths=1.3, colors=colour)
        axes.text(summary.closed_at_s * 1.012, row, str(len(times_s)), va="center", color=colour, fontweight="bold")
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    _shade_outages(axes, evidence, is_labelled=False)


def _draw_bits(axes: Axes, summary: Summary) -> None:
    axes.set_title("Bits per parameter of a delta (up) and of a version (down)")
    rows = [
        (summary.bits_per_parameter_down, MAX_BITS_DOWN, _DOWN),
        (summary.bits_per_parameter_up, MAX_BITS_UP, _MERGED),
    ]
    axes.barh([2], [_FLOAT32_BITS], color=_GRID, height=0.55)
    axes.text(_FLOAT32_BITS - 0.6, 2, "32, uncompressed", va="center", ha="right", color=_SINGLE)
    for position, (bits, limit, colour) in enumerate(rows):
        axes.barh([position], [bits], color=colour, height=0.55)
        axes.plot([limit, limit], [position - 0.36, position + 0.36], color=_INK, lw=1.6)
        axes.text(max(bits, limit) + 0.6, position, f"{bits:.2f}", va="center", fontweight="bold", color=colour)
        axes.text(max(bits, limit) + 4.0, position, f"limit {limit:.0f}", va="center", color=_FAINT, fontsize=9)
    axes.set_yticks([0, 1, 2], ["down", "up", "float32"])
    axes.set_xlim(0, _FLOAT32_BITS)
    axes.grid(visible=False, axis="y")


def _draw_stalls(axes: Axes, evidence: Evidence, summary: Summary) -> None:
    axes.set_title("Pause of each training step by synchronisation, ms")
    for learner, colour in zip(evidence.plan.learners, _LEARNERS, strict=True):
        lines = evidence.learners[learner.learner_id].lines
        times_s = [evidence.timeline.since_start_s(line.unix_s) for line in lines]
        axes.scatter(times_s, [max(line.sync_stall_ms, 1e-2) for line in lines], s=5, color=colour, alpha=0.55, lw=0)
    axes.set_yscale("log")
    axes.set_ylim(1e-2, max(MAX_STALL_MS, summary.max_step_stall_ms) * 4)
    axes.axhline(MAX_STALL_MS, color=_INK, lw=1.2, ls=(0, (2, 2)))
    axes.text(0, MAX_STALL_MS * 1.15, f" limit {MAX_STALL_MS:.0f} ms", color=_INK, fontsize=9, va="bottom")
    longest = (summary.max_step_stall_at_s, summary.max_step_stall_ms)
    is_late = longest[0] > summary.closed_at_s / 2
    axes.annotate(
        f"longest {summary.max_step_stall_ms:.1f} ms",
        longest,
        xytext=(-8, 0) if is_late else (8, 0),
        textcoords="offset points",
        va="center",
        ha="right" if is_late else "left",
        fontweight="bold",
        color=_MERGED,
        bbox={"pad": 1, "fc": axes.get_facecolor(), "ec": "none"},  # over the limit's line, where they meet
    )
    axes.scatter([longest[0]], [longest[1]], s=46, fc="none", ec=_MERGED, lw=1.6)
    axes.set_xlabel(_TIME_LABEL)
    _shade_outages(axes, evidence, is_labelled=False)


def _shade_outages(axes: Axes, evidence: Evidence, *, is_labelled: bool) -> None:
    killed = evidence.plan.killed_learner_id
    colour = _LEARNERS[[learner.learner_id for learner in evidence.plan.learners].index(killed)]
    outages: list[tuple[Moment, Moment, str, str]] = [
        ("learner_killed", "learner_back", colour, f"{killed} killed"),
        ("syncer_killed", "syncer_back", _SYNCER, "syncer killed"),
    ]
    for first, last, colour, text in outages:
        first_s, last_s = evidence.timeline.at_s(first), evidence.timeline.at_s(last)
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
    """The baseline's losses, each at the time at which the first learner had taken as many steps."""
    timekeeper = evidence.learners[evidence.plan.timekeeper.learner_id]
    times_by_step = {line.step: evidence.timeline.since_start_s(line.unix_s) for line in timekeeper.lines}
    points = [
        (times_by_step[line.step], loss) for line, loss in evidence.single.evaluations if line.step in times_by_step
    ]
    return [time_s for time_s, _ in points], [loss for _, loss in points]
