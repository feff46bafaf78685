"""Which outer settings suit LoRA adapters: `python -m benchmarks.quality.adapters`.

A model that was trained on Python is frozen, and adapters of rank 4 learn C++ headers. Everything else is as in the
other arms: the product's rounds, merge, codecs, schedule and adoption, and one learner alone or one place beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from benchmarks.quality.arms import Arm, DataParallel, Island, Job, islands
from benchmarks.quality.cases import SETTINGS, outer_policy
from benchmarks.quality.jobs import Outcomes, run_jobs
from benchmarks.quality.statistics import estimate, percent_over
from benchmarks.quality.table import Line, print_lines
from benchmarks.quality.task import CPP
from benchmarks.report import DIRECTORY

COMMITTED: Final = Path(__file__).parent / "results" / "adapters.jsonl"
STEPS: Final = 300
RANK: Final = 4
ALONE_RATE: Final = 2.4e-2
TOGETHER_RATES: Final = {2: 3.4e-2, 4: 4.8e-2}
"""The best of a grid; that of two in one place follows from the others by the square root."""

DEFAULTS: Final = "the defaults (RDA, warm-up to 0.8, settling)"
_OUTER: Final[Mapping[str, Mapping[str, Any]]] = {
    DEFAULTS: {},
    "plain averaging (mean, 1.0/0)": SETTINGS["mean, no momentum"],
    "RDA, 1.0/0": outer_policy("nesterov", 1.0, 0.0, "constant", "rda"),
    "mean, Nesterov 0.8/0.5": SETTINGS["mean, constant 0.8/0.5"],
    "mean, Nesterov 0.7/0.9 (DiLoCo)": outer_policy("nesterov", 0.7, 0.9, "constant"),
}
_ENCODING: Final = {"codec": "int4", "block": 256, "vector_codec": "float32", "compressor": "zstd"}


@dataclass(frozen=True)
class Cell:
    """One column of the table."""

    learner_count: int
    inner_step_count: int = 24
    step_count: int = STEPS
    seeds: tuple[int, ...] = (0, 1, 2)

    @property
    def name(self) -> str:
        """What the column is called."""
        return f"M = {self.learner_count}, H = {self.inner_step_count}, {len(self.seeds)} seeds"

    def arms(self) -> dict[str, Arm]:
        """Returns the column's rows, the defaults first."""
        count, steps = self.learner_count, self.step_count
        return {
            **{name: self.adapters(policy) for name, policy in _OUTER.items()},
            "one learner alone": DataParallel(1, steps, ALONE_RATE, data=CPP, rank=RANK),
            "all batches in one place": DataParallel(count, steps, TOGETHER_RATES[count], data=CPP, rank=RANK),
        }

    def adapters(self, policy: Mapping[str, Any]) -> Arm:
        """Returns learners that train adapters under the policy."""
        given = {"delta_encoding": _ENCODING, "update_encoding": _ENCODING, **policy}
        return islands(
            self.learner_count,
            self.step_count,
            ALONE_RATE,
            policy={"inner_step_count": self.inner_step_count, **given},
            islands=(Island(data=CPP),) * self.learner_count,
            judged_on=(CPP,),
            rank=RANK,
        )


TABLE: Final = (Cell(2), Cell(4))


def jobs() -> list[Job]:
    """Returns every job of the table."""
    return [Job(arm, seed) for cell in TABLE for arm in cell.arms().values() for seed in cell.seeds]


def lines(outcomes: Outcomes) -> list[Line]:
    """Returns the losses of every arm, and by how many percent they are above the defaults' of the same seed."""
    made = []
    for cell in TABLE:
        arms = cell.arms()
        for name, arm in arms.items():
            losses = _losses(arm, cell, outcomes)
            made.append(Line(f"{cell.name}: {name}", "loss", estimate(losses), "nats/byte"))
            over = percent_over(losses, _losses(arms[DEFAULTS], cell, outcomes))
            made.append(Line(f"{cell.name}: {name}", "over the defaults", over, "%"))
    return made


def _losses(arm: Arm, cell: Cell, outcomes: Outcomes) -> list[float]:
    return [outcomes[Job(arm, seed)].losses[CPP] for seed in cell.seeds]


@click.command()
@click.option("--committed", is_flag=True, help="Show the committed results; train nothing.")
@click.option("--processes", type=click.IntRange(min=1), default=1, show_default=True, help="Jobs at a time.")
def main(*, committed: bool, processes: int) -> None:
    """Train adapters under several outer settings, and print what they come to."""
    outcomes = Outcomes(COMMITTED if committed else DIRECTORY / "quality-adapters.jsonl")
    if committed and [job for job in jobs() if job not in outcomes]:
        raise click.ClickException("the committed results lack jobs. run it without --committed to train them")
    run_jobs(jobs(), outcomes, process_count=processes)
    print_lines("adapters", lines(outcomes))


if __name__ == "__main__":
    main()
