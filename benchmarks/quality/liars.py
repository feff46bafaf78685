"""`python -m benchmarks.quality.liars`: what it costs that one learner of three or five is broken or lies, as a table.

Each row is a run with such a learner against the honest ones alone, on the same data and with the default merge. One
seed, because a lie that ruins a run does so under any.
"""

from __future__ import annotations

import math
from typing import Any, Final

import click
import torch

from benchmarks.quality.arms import Islands, Outcome
from benchmarks.quality.cases import default
from benchmarks.quality.lies import BROKEN, LIES, Lie
from benchmarks.quality.world import train_islands
from benchmarks.report import DIRECTORY, write_rows
from benchmarks.report import Row as ReportRow
from skerry.wire.policy import Policy

STEPS: Final = 96
INNER_STEPS: Final = 8
BOUND_PERCENT: Final = 5.0
"""The most that a liar may cost, where at most a third lie."""


def arm(learner_count: int, merge: str, **settings: Any) -> Islands:
    """Returns a short run of twelve rounds; each learner's data are a fifth, however many there are."""
    policy = {"inner_step_count": INNER_STEPS, "merge": merge, "quarantine_ratio": Policy().quarantine_ratio}
    return default(learner_count, STEPS, policy=policy, shard_count=5, **settings)


def lived(learner_count: int, merge: str, lie: Lie | None, seed: int = 0) -> Outcome:
    """Returns the outcome with a liar as the last learner, or of honest learners.

    A flood has links without delay, on which it does the most harm.
    """
    settings = {"delay": 0.1} if lie and lie.is_flood else {}
    return train_islands(arm(learner_count, merge, **settings), seed, lie)


def percent_over(outcome: Outcome, reference: Outcome) -> float:
    """Returns by how many percent the loss is above the reference's."""
    return 100 * (outcome.losses["python"] / reference.losses["python"] - 1)


def cell(outcome: Outcome, reference: Outcome) -> str:
    """Returns a table's cell: the cost, and who was quarantined from which round on."""
    figures = outcome.figures
    cost = f"{percent_over(outcome, reference):+.1f} %" if math.isfinite(outcome.losses["python"]) else "diverged"
    if figures["quarantined_liar"]:
        cost += (
            f"; quarantined {figures['quarantined_liar']:.0f} times, first in round {figures['first_quarantine']:.0f}"
        )
    if figures["quarantined_honest"]:
        cost += f"; honest deltas quarantined: {figures['quarantined_honest']:.0f}"
    return cost


@click.command()
@click.option("--only", multiple=True, help="Lies, by name.  [default: all]")
@click.option(
    "--learners", type=int, multiple=True, default=(3, 5), show_default=True, help="How many, one of them a liar."
)
@click.option("--merge", multiple=True, default=("rda", "geometric-median"), show_default=True)
def main(only: tuple[str, ...], learners: tuple[int, ...], merge: tuple[str, ...]) -> None:
    """Let one learner lie, and print what it costs as a table for documents."""
    torch.set_num_threads(1)
    rows: list[ReportRow] = []
    kinds = [(rule, count) for rule in merge for count in learners]
    honest = {count: lived(count - 1, "rda", None) for count in learners}
    references = {(rule, count): honest[count] for rule, count in kinds}
    click.echo("| what is wrong with it | " + " | ".join(f"1 of {count}, {rule}" for rule, count in kinds) + " |")
    click.echo("|---|" + "---|" * len(kinds))
    for name in only or ("none: it is honest", *BROKEN, *LIES):
        found = {(rule, count): lived(count, rule, BROKEN.get(name, LIES.get(name))) for rule, count in kinds}
        click.echo(f"| {name} | " + " | ".join(cell(found[kind], references[kind]) for kind in kinds) + " |")
        rows += [
            ReportRow(
                f"1 of {count}, {rule}: {name}",
                "over the run without it",
                percent_over(found[rule, count], reference),
                "%",
            )
            for (rule, count), reference in references.items()
        ]
    write_rows("liars", rows)
    click.echo(f"rows: {DIRECTORY / 'liars.json'}", err=True)


if __name__ == "__main__":
    main()
