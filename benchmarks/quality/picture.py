"""The picture of the table: how much of the gap four learners close."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

from benchmarks.quality.cases import TABLE, Gap
from benchmarks.quality.jobs import Outcomes
from benchmarks.quality.table import lines_of

_LEARNERS: Final = "#c2255c"
_ALONE: Final = "#8a96a3"
_TOGETHER: Final = "#1c7ed6"


def draw(outcomes: Outcomes, path: Path) -> Path:
    """Draws how much of the gap between one learner and one place four learners close, and returns the path."""
    (case,) = [case for case in TABLE if isinstance(case, Gap)]
    lines = {line.metric: line for line in lines_of(case, outcomes)}
    with mpl.rc_context(
        {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True}
    ):
        figure, axes = plt.subplots(figsize=(8.4, 2.3), dpi=144)
    rows = (
        ("single-learner baseline", "loss alone", _ALONE),
        ("four learners", "loss", _LEARNERS),
        ("all batches in one place", "loss data-parallel", _TOGETHER),
    )
    for place, (_, metric, colour) in enumerate(rows):
        found = lines[metric].estimate
        axes.errorbar(found.mean, place, xerr=found.half_width or 0, fmt="o", markersize=9, color=colour, capsize=4)
        axes.text(found.mean, place - 0.22, f"{found.mean:.3f}", ha="center", va="bottom", color=colour)
    share = lines["share of the gap"].estimate
    axes.set_title(f"Four learners close {share.mean:.0%} of the gap between one learner and one place")
    axes.set_yticks(range(len(rows)), [label for label, _, _ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.8)
    axes.set_xlabel("held-out loss after 1500 steps, nats a byte; whiskers: 95 % interval")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)
    return path
