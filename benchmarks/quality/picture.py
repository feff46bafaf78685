"""Pictures of the table: how much of the gap is closed, what each comparison costs, and how the defaults hold up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

from benchmarks.quality.arms import Arm, Job
from benchmarks.quality.cases import Case, Cell, Comparison, Gap
from benchmarks.quality.jobs import Outcomes
from benchmarks.quality.statistics import percent_over
from benchmarks.quality.table import lines_of
from benchmarks.quality.task import PYTHON

_INK: Final = "#1d2733"
_FAINT: Final = "#8a96a3"
_GOOD: Final = "#0ca678"
_BAD: Final = "#e03131"
_LEARNERS: Final = "#c2255c"
_ALONE: Final = "#8a96a3"
_TOGETHER: Final = "#1c7ed6"
_TRIED: Final = ("#f08c00", "#7048e8", "#1c7ed6", "#20c997", "#495057")


def draw(cases: Sequence[Case], outcomes: Outcomes, directory: Path) -> list[Path]:
    """Draws what there is to draw of `cases` as PNGs in `directory` and returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    with mpl.rc_context(
        {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True}
    ):
        gaps = [case for case in cases if isinstance(case, Gap)]
        comparisons = [case for case in cases if isinstance(case, Comparison)]
        cells = [case for case in cases if isinstance(case, Cell)]
        if gaps:
            paths.append(_draw_gap(gaps[0], outcomes, directory / "quality-gap.png"))
        if comparisons:
            paths.append(_draw_comparisons(comparisons, outcomes, directory / "quality-costs.png"))
        if cells:
            paths.append(_draw_cells(cells, outcomes, directory / "quality-cells.png"))
    return paths


def _draw_gap(case: Gap, outcomes: Outcomes, path: Path) -> Path:
    lines = {line.metric: line for line in lines_of(case, outcomes)}
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
    return _save(figure, path)


def _draw_comparisons(cases: Sequence[Comparison], outcomes: Outcomes, path: Path) -> Path:
    figure, axes = plt.subplots(figsize=(9.6, 0.5 * len(cases) + 1.5), dpi=144)
    for place, case in enumerate(cases):
        line = next(line for line in lines_of(case, outcomes) if line.unit == "%")
        found = line.estimate
        colour = _GOOD if line.is_met else _BAD
        axes.errorbar(found.mean, place, xerr=found.half_width or 0, fmt="o", color=colour, capsize=3)
        axes.plot([case.bound, case.bound], [place - 0.32, place + 0.32], color=_INK, linewidth=2)
    axes.axvline(0, color=_FAINT, linewidth=1)
    axes.set_yticks(range(len(cases)), [f"{case.case}\nagainst {case.reference_name}" for case in cases], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("loss above the reference, % (less is better); whiskers: 95 % interval, bar: the bound")
    axes.set_title("What delay, four bits, speed and failure cost")
    return _save(figure, path)


def _draw_cells(cases: Sequence[Cell], outcomes: Outcomes, path: Path) -> Path:
    figure, axes = plt.subplots(figsize=(9.6, 4.2), dpi=144)
    labelled: set[str] = set()
    names = list(dict.fromkeys(name for case in cases for name in case.settings))
    for place, case in enumerate(cases):
        for name, percent in _over_defaults(case, outcomes).items():
            is_alone = name not in names
            axes.plot(
                place,
                percent,
                "x" if is_alone else "o",
                color=_ALONE if is_alone else _TRIED[names.index(name) % len(_TRIED)],
                label=None if name in labelled else name,
            )
            labelled.add(name)
    axes.axhline(0, color=_LEARNERS, linewidth=2, label="the defaults")
    axes.set_xticks(range(len(cases)), [case.case.replace(", ", "\n") for case in cases])
    axes.set_ylabel("loss above the defaults', %")
    axes.set_title("The defaults against other outer settings, by learners and length")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return _save(figure, path)


def _over_defaults(case: Cell, outcomes: Outcomes) -> dict[str, float]:
    """Returns by how many percent each rival of the cell is above the defaults."""

    def losses(arm: Arm) -> list[float]:
        return [outcomes[Job(arm, seed)].losses[PYTHON] for seed in case.seeds]

    rivals = {**case.settings, "the single-learner baseline": case.alone}
    return {name: percent_over(losses(arm), losses(case.subject)).mean for name, arm in rivals.items()}


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)
    return path
