"""The picture of a history, beside the one without its outages."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from skerry_syncer.simulation.history import History

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(history: History, without: History | None) -> Figure:
    """Draws goodput, participation and staleness over time, and what the outages cost."""
    from matplotlib.figure import Figure  # slow to load, and not everybody has it

    rows, calm = history.over_time(), without.over_time() if without else []
    hours = [row["start_s"] / 3600 for row in rows]
    names = ["goodput", "merged steps behind", "participation", "staleness"]
    figure = Figure(figsize=(8, 8), layout="constrained")
    panels = dict(zip(names, figure.subplots(len(names), 1, sharex=True), strict=True))
    for name in ("goodput", "participation", "staleness"):
        if calm:
            panels[name].plot(hours, [row[name] for row in calm], color="tab:gray", label="without outages")
        panels[name].plot(hours, [row[name] for row in rows], label="as given")
        panels[name].set_ylim(bottom=0)
    behind = accumulate(
        b["merged_step_count"] - a["merged_step_count"] for a, b in zip(rows, calm or rows, strict=True)
    )
    panels["merged steps behind"].plot(hours, list(behind))
    for name, axes in panels.items():
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
        for outage in history.scenario.outages:
            axes.axvspan(outage.start_s / 3600, min(outage.end_s / 3600, hours[-1]), color="tab:red", alpha=0.12)
    panels["goodput"].set_ylim(0, 1.2)
    panels["goodput"].legend(fontsize="small", loc="lower right")
    panels["staleness"].set_xlabel("hours; shaded: an outage")
    return figure
