"""`skerry demo`: train on three learners, kill one of them and the syncer, and write a page about it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from skerry.runtime.options import OUTPUT_FOLDER, Count, Number

if TYPE_CHECKING:
    from rich.console import Console

    from skerry_demo.history import History
    from skerry_demo.judgement import Judge
    from skerry_demo.plan import DemoPlan
    from skerry_demo.processes import Nursery
    from skerry_demo.scenario import Scenario
    from skerry_demo.summary import Evidence, Summary

_EPILOG: Final = """\b
Examples:
  skerry demo
  skerry demo --out /tmp/demo --steps 400
"""
_JUDGED_POSITIONS: Final = 16


@click.command("demo", epilog=_EPILOG)
@click.option(
    "--out",
    type=OUTPUT_FOLDER,
    default=Path("build", "demo"),
    help="Directory for the page, the picture, the figures, the logs and the store.",
)
@click.option("--steps", type=Count(60, 10**6), help="Training steps of a fast learner.  [default: what fits --budget]")
@click.option(
    "--budget",
    type=Number(60, 86_400),
    default=180.0,
    help="Seconds that the demo should take on this machine.",
)
def demo(out: Path, steps: int | None, budget: float) -> None:
    """Train one model on three learners and a syncer, kill a learner and the syncer, and show the result.

    One learner is three times slower than the others. After a third of the steps a fast learner is killed with SIGKILL,
    and restarted later. After two thirds the syncer is killed and restarted from its store. Before all that a single
    learner is trained with as many tokens, to compare with.

    The result is a page (index.html), a picture (demo.png) and figures (summary.json). The exit status is 1 if the
    merged model is no better than the single learner's, if a version cannot be recomputed from its deltas, or if an
    acknowledged delta has no fate.
    """
    from rich.console import Console

    from skerry_demo.processes import ChildError

    console = Console()
    begun_s = time.monotonic()
    try:
        with _interrupt_on_terminate():
            summary = _run(out.absolute(), steps, budget, console, begun_s)
    except ChildError as error:
        raise click.ClickException(str(error)) from error
    _print_result(console, summary, out)
    if summary.failures:
        raise click.exceptions.Exit(1)


def _run(directory: Path, steps: int | None, budget_s: float, console: Console, begun_s: float) -> Summary:
    import torch

    from skerry_demo.judgement import Judge
    from skerry_demo.live import LiveView
    from skerry_demo.page import write_page
    from skerry_demo.picture import draw
    from skerry_demo.plan import DemoPlan, TrainingPlan, affordable_steps
    from skerry_demo.processes import Nursery
    from skerry_demo.scenario import Scenario
    from skerry_demo.summary import summarise

    torch.set_num_threads(1)
    training = TrainingPlan()
    console.print("measuring the speed of this machine")
    judge = Judge(training)
    plan = DemoPlan(directory, steps or affordable_steps(judge.step_time_s(), budget_s), training)
    console.print(
        f"training for {plan.step_count} steps of {training.batch_size} sequences; logs are in {directory}/logs"
    )
    with Nursery(directory, _environment()) as nursery:
        with LiveView(console) as view:
            scenario = Scenario(plan, nursery, show=view.refresh)
            scenario.run()
        console.print("reading the log, replaying every version, measuring the merged model at several positions")
        evidence = _gather(scenario, nursery, judge, begun_s)
    summary = summarise(evidence)
    (directory / "summary.json").write_text(json.dumps(asdict(summary), indent=2) + "\n")
    draw(evidence, summary, directory / "demo.png")
    write_page(evidence, summary, picture=directory / "demo.png", path=directory / "index.html")
    return summary


def _gather(scenario: Scenario, nursery: Nursery, judge: Judge, begun_s: float) -> Evidence:
    from skerry_demo.judgement import JudgedPosition
    from skerry_demo.summary import Evidence

    plan = scenario.plan
    history = asyncio.run(_read_history(plan))
    arguments = ["verify", plan.run, "--store", plan.store_url, "--json"]
    verified = nursery.output("verify", arguments, accepted=(0, 1))
    (plan.directory / "verify.json").write_text(verified)
    return Evidence(
        plan=plan,
        timeline=scenario.timeline,
        single=scenario.single,
        learners=scenario.learners,
        history=history,
        merged=[
            JudgedPosition(position, history.unix_s[position], _exported_loss(plan, nursery, judge, position))
            for position in history.positions_to_judge(_JUDGED_POSITIONS)
        ],
        initial_loss=_exported_loss(plan, nursery, judge, history.initial_position),
        single_loss=judge.loss_of_checkpoint(scenario.checkpoint_of_baseline),
        verify_ok=bool(json.loads(verified)["ok"]),
        parameter_count=judge.parameter_count,
        duration_s=time.monotonic() - begun_s,
        core_count=os.cpu_count() or 1,
        load_average=os.getloadavg()[0],
    )


async def _read_history(plan: DemoPlan) -> History:
    from skerry_demo.history import read_history
    from skerry_syncer.store.maintenance.options import opened_log

    async with opened_log(plan.store_url, plan.run, None) as (log, _):
        return await read_history(log)


def _exported_loss(plan: DemoPlan, nursery: Nursery, judge: Judge, position: int) -> float:
    path = plan.directory / "exports" / f"{position}.safetensors"
    path.parent.mkdir(exist_ok=True)
    arguments = [plan.run, "--store", plan.store_url, "--position", str(position), "--out", str(path)]
    nursery.output("export", ["export", *arguments])
    return judge.loss_of_export(path)


def _print_result(console: Console, summary: Summary, out: Path) -> None:
    console.print()
    for check in summary.checks:
        mark = "[green]passed[/]" if check.is_met else "[red]failed[/]" if check.is_required else "[yellow]not met[/]"
        console.print(f"{mark}  {check.name}: {check.detail}", highlight=False)
    console.print(f"\n{out / 'index.html'}\n{out / 'demo.png'}\n{out / 'summary.json'}", highlight=False)


def _environment() -> dict[str, str]:
    """This process's environment without `SKERRY_` variables, which may be meant for another run."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SKERRY_")}
    # One thread a learner: three of them often share two cores, and more threads would only wait for one another.
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@contextmanager
def _interrupt_on_terminate() -> Iterator[None]:
    """Make SIGTERM raise KeyboardInterrupt, so that the child processes are ended."""

    def on_terminate(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, on_terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
