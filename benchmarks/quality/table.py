"""What the cases came to: one line each, with mean, interval and bound, for people and as rows of JSON.

A bound is met where the whole interval is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.console import Console
from rich.table import Table

from benchmarks.quality.arms import Arm, Job
from benchmarks.quality.cases import Case, Cell, Comparison, Gap, Plain
from benchmarks.quality.jobs import Outcomes
from benchmarks.quality.statistics import Estimate, estimate, percent_over, share_of_gap
from benchmarks.quality.task import PYTHON
from benchmarks.report import Row


@dataclass(frozen=True)
class Line:
    """One measured quantity of a case."""

    case: str
    metric: str
    estimate: Estimate
    unit: str
    bound: float | None = None
    interval: float | None = None  # the half width of the 95 % interval must be below
    is_met: bool | None = None  # None where nothing is demanded, or one seed can't say

    def to_row(self) -> Row:
        """As all benchmarks report."""
        ratio = self.estimate.mean / self.bound if self.bound else None
        return Row(self.case, self.metric, self.estimate.mean, self.unit, self.bound, ratio, self.estimate.samples)


def print_lines(title: str, lines: Iterable[Line]) -> None:
    """Prints them as a table."""
    table = Table(title=f"{title}: paired by seed, ± is the half width of the 95 % interval")
    for heading in ("case", "measured", "value", "seeds", "bound", "met"):
        table.add_column(heading, justify="right" if heading in {"value", "seeds", "bound"} else "left")
    before = ""
    for line in lines:
        half_width = line.estimate.half_width
        width = "" if half_width is None else f" ± {half_width:.3g}"
        table.add_row(
            "" if line.case == before else line.case,
            line.metric,
            f"{line.estimate.mean:.4g}{width} {line.unit}",
            str(len(line.estimate.samples)),
            "" if line.bound is None else f"{line.bound:g}",
            "" if line.is_met is None else "yes" if line.is_met else "NO",
        )
        before = line.case
    Console(width=150).print(table)


def lines_of(case: Case, outcomes: Outcomes) -> Iterable[Line]:
    """Yields what a case whose jobs are all done has shown."""
    match case:
        case Comparison():
            yield from _compared(case, outcomes)
        case Gap():
            yield from _gap(case, outcomes)
        case Cell():
            yield from _cell(case, outcomes)
        case Plain():
            yield from _plain(case, outcomes)


def _losses(arm: Arm, seeds: Sequence[int], outcomes: Outcomes, data: str = PYTHON) -> list[float]:
    return [outcomes[Job(arm, seed)].losses[data] for seed in seeds]


def _compared(case: Comparison, outcomes: Outcomes) -> Iterable[Line]:
    subject = _losses(case.subject, case.seeds, outcomes)
    over = percent_over(subject, _losses(case.reference, case.seeds, outcomes))
    yield Line(case.case, "loss", estimate(subject), "nats/byte")
    is_met = over.is_at_most(case.bound)
    if is_met and case.interval is not None and over.half_width is not None:
        is_met = over.half_width < case.interval
    yield Line(case.case, f"over {case.reference_name}", over, "%", case.bound, case.interval, is_met)


def _gap(case: Gap, outcomes: Outcomes) -> Iterable[Line]:
    together_losses = {count: _losses(arm, case.seeds, outcomes) for count, arm in case.together.items()}
    longest = max(together_losses)
    subject, alone = (_losses(arm, case.seeds, outcomes) for arm in (case.subject, case.alone))
    share = share_of_gap(subject, alone, together_losses[longest])
    over = percent_over(subject, together_losses[longest])
    steps = [
        _steps_for(loss, {count: losses[index] for count, losses in together_losses.items()})
        for index, loss in enumerate(subject)
    ]
    yield Line(case.case, "loss", estimate(subject), "nats/byte")
    yield Line(case.case, "loss alone", estimate(alone), "nats/byte")
    yield Line(case.case, "loss data-parallel", estimate(together_losses[longest]), "nats/byte")
    is_met = None if share.half_width is None else share.interval[0] >= case.share
    yield Line(case.case, "share of the gap", share, "", case.share, None, is_met)
    yield Line(case.case, "over data-parallel", over, "%", case.bound, None, over.is_at_most(case.bound))
    yield Line(case.case, f"steps that data-parallel needs, of {longest}", estimate(steps), "steps")


def _steps_for(loss: float, by_steps: Mapping[int, float]) -> float:
    """Returns the steps at which data-parallel runs of several lengths would have had `loss`, between two of them."""
    counts = sorted(by_steps)
    for shorter, longer in pairwise(counts):
        if by_steps[longer] <= loss <= by_steps[shorter]:
            part = (by_steps[shorter] - loss) / (by_steps[shorter] - by_steps[longer])
            return shorter + part * (longer - shorter)
    return float(counts[-1] if loss < by_steps[counts[-1]] else counts[0])


def _cell(case: Cell, outcomes: Outcomes) -> Iterable[Line]:
    subject, alone = (_losses(arm, case.seeds, outcomes) for arm in (case.subject, case.alone))
    tried = {name: _losses(arm, case.seeds, outcomes) for name, arm in case.settings.items()}
    against = percent_over(subject, alone)
    yield Line(case.case, "loss", estimate(subject), "nats/byte")
    chosen_on = len(case.seeds) // 2  # the seeds before are for the choice, the others for the report
    if chosen_on:
        best = min(tried, key=lambda name: sum(tried[name][:chosen_on]))
        over = percent_over(subject[chosen_on:], tried[best][chosen_on:])
        name = f"over the best of the others: {best}"
        yield Line(case.case, name, over, "%", case.bound, None, over.is_at_most(case.bound))
    yield Line(case.case, "over the single-learner baseline", against, "%", 0.0, None, against.is_at_most(0.0))


def _plain(case: Plain, outcomes: Outcomes) -> Iterable[Line]:
    for name, arm in case.arms.items():
        kinds = outcomes[Job(arm, case.seeds[0])].losses
        for data in kinds:
            label = name if len(kinds) == 1 else f"{name}: loss on {data}"
            yield Line(case.case, label, estimate(_losses(arm, case.seeds, outcomes, data)), "nats/byte")
