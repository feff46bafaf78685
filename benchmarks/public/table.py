"""The public table and its picture: held-out losses, and shares of the gap between one learner and one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import matplotlib as mpl
from matplotlib.axes import Axes
from rich.table import Table

from benchmarks.public.cases import (
    ALONE,
    DECOUPLED,
    KINDS,
    LENGTHS,
    SEEDS,
    SYNCHRONOUS,
    TOGETHER,
    lengths_of,
    seeds_of,
    tuning_steps,
)
from benchmarks.quality.jobs import Outcomes
from benchmarks.quality.statistics import Estimate, estimate, percent_over, share_of_gap

mpl.use("Agg")

import matplotlib.pyplot as plt

_COLOURS: Final = {ALONE: "#8a96a3", TOGETHER: "#1c7ed6", SYNCHRONOUS: "#e8890c", DECOUPLED: "#c2255c"}
_LABELS: Final = {
    ALONE: "one learner",
    TOGETHER: "all batches in one place",
    SYNCHRONOUS: "four, synchronous DiLoCo",
    DECOUPLED: "four, Skerry",
}


@dataclass(frozen=True)
class Results:
    """What is known of one size on one text."""

    outcomes: Outcomes
    size: str
    text: str
    rates: Mapping[str, float]  # peak rate by kind that is tuned

    def losses(self, name: str, steps: int) -> dict[int, float]:
        """Returns by seed the known held-out losses of a row after so many steps of each learner."""
        if (KINDS[name].tuned_as or name) not in self.rates or steps not in lengths_of(name, self.size):
            return {}
        made = seeds_of(name, self.size, self.text, steps, self.rates)
        return {job.seed: self.outcomes[job].losses[self.text] for job in made if job in self.outcomes}

    def rate(self, name: str) -> str:
        """Returns a row's peak rate; empty while it is not tuned."""
        rate = self.rates.get(KINDS[name].tuned_as or name)
        return "" if rate is None else f"{KINDS[name].make(self.size, self.text, 1, rate).peak_rate:g}"

    def loss(self, name: str, steps: int) -> Estimate | None:
        """Returns the held-out loss of a row; None while no seed is known."""
        losses = self.losses(name, steps)
        return estimate(list(losses.values())) if losses else None

    def share(self, name: str, steps: int) -> Estimate | None:
        """Returns the share of the gap between one learner and one place that a row closes, paired by seed."""
        paired = self._paired(steps, name, ALONE, TOGETHER)
        return share_of_gap(*paired) if paired and (KINDS[name].tuned_as or name) not in (ALONE, TOGETHER) else None

    def over(self, name: str, reference: str, steps: int) -> Estimate | None:
        """Returns by how many percent a row's loss is above another's, paired by seed."""
        paired = self._paired(steps, name, reference)
        return percent_over(*paired) if paired else None

    def _paired(self, steps: int, *names: str) -> list[list[float]]:
        """Returns the losses of each row under the seeds that all of them have; nothing if there are none."""
        losses = [self.losses(name, steps) for name in names]
        seeds = [seed for seed in losses[0] if all(seed in known for known in losses)]
        return [[known[seed] for seed in seeds] for known in losses] if seeds else []


def table(results: Results) -> Table:
    """Returns losses with the half width of their 95 % interval, and below them shares of the gap or differences."""
    lengths = LENGTHS[results.size]
    made = Table(
        "",
        "peak rate",
        *(f"{steps} steps" for steps in lengths),
        title=f"{results.size} parameters, {results.text}: held-out loss, share of the gap, % over plain decoupled",
        caption="± is the half width of a 95 % interval; (n): of n seeds so far; "
        f"rates are tuned at {tuning_steps(results.size)} steps",
    )
    for name, kind in KINDS.items():
        if not lengths_of(name, results.size):
            continue
        cells = []
        for steps in lengths:
            share = results.share(name, steps)
            over = results.over(name, DECOUPLED, steps) if kind.tuned_as == DECOUPLED else None
            loss, count = results.loss(name, steps), len(SEEDS[results.size])
            shown = (_shown(loss, 3, count), _shown(share, 2, count), _shown(over, 1, count, sign="+"))
            cells.append("\n".join(filter(None, shown)) + "\n")
        made.add_row(name, results.rate(name), *cells)
    return made


def _shown(value: Estimate | None, digits: int, all_seeds: int, *, sign: str = "") -> str:
    if value is None:
        return ""
    width = "" if value.half_width is None else f" ± {value.half_width:.{digits}f}"
    count = len(value.samples)
    return f"{value.mean:{sign}.{digits}f}{width}" + " %" * bool(sign) + f" ({count})" * (count < all_seeds)


def draw(results: Results, path: Path) -> Path:
    """Draws losses by the length of the run, and what each difficulty costs, and returns the path."""
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True}):
        figure, (by_length, by_row) = plt.subplots(
            1, 2, figsize=(10.5, 3.6), dpi=144, width_ratios=(1.15, 1), layout="constrained"
        )
    shown: set[int] = set()
    for name, label in _LABELS.items():
        known = [(steps, loss) for steps in LENGTHS[results.size] if (loss := results.loss(name, steps))]
        shown |= {steps for steps, _ in known}
        if known:
            steps_known, means = [steps for steps, _ in known], [loss.mean for _, loss in known]
            widths = [loss.half_width or 0.0 for _, loss in known]
            by_length.errorbar(
                steps_known, means, yerr=widths, marker="o", markersize=5, capsize=3, color=_COLOURS[name], label=label
            )
    by_length.set_xscale("log")
    by_length.set_xticks(sorted(shown), [str(steps) for steps in sorted(shown)])
    by_length.minorticks_off()
    by_length.set_xlabel("steps of each learner")
    by_length.set_title(f"held-out loss, {results.size} parameters", loc="left", fontsize=11)
    by_length.grid(visible=True, alpha=0.4)
    by_length.legend(frameon=False, fontsize=9)
    _draw_differences(results, by_row)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
    return path


def _draw_differences(results: Results, axes: Axes) -> None:
    """Draws by how much each row's loss differs from that of plain decoupled training, after each length."""
    rows = [
        (f"{name.removeprefix(f'{DECOUPLED}, ')}, {steps} steps", over)
        for name, kind in KINDS.items()
        if kind.tuned_as == DECOUPLED
        for steps in lengths_of(name, results.size)
        if (over := results.over(name, DECOUPLED, steps)) and over.half_width
    ]
    for place, (_, over) in enumerate(rows):
        axes.errorbar(over.mean, place, xerr=over.half_width, fmt="o", capsize=3, color=_COLOURS[DECOUPLED])
    axes.axvline(0, color="#8a96a3", linewidth=1)
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    axes.invert_yaxis()
    axes.grid(visible=True, axis="x", alpha=0.4)
    axes.set_xlabel("% of loss over the defaults; negative is better")
    axes.set_title("what a change costs four learners", loc="left", fontsize=11)
