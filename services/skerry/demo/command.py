"""`skerry demo`: three islands and a syncer as real processes, two of them killed, and a page about it."""

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

if TYPE_CHECKING:
    from rich.console import Console

    from skerry.demo.history import History
    from skerry.demo.judgement import Judge, JudgedPosition
    from skerry.demo.plan import DemoPlan
    from skerry.demo.processes import Nursery
    from skerry.demo.scenario import Scenario
    from skerry.demo.summary import Evidence, Summary

_EPILOG: Final = """\b
Examples:
  skerry demo
  skerry demo --out /tmp/demo --steps 400
"""
_JUDGED_POSITIONS: Final = 16
_COMMAND_TIMEOUT_S: Final = 120.0


@click.command("demo", epilog=_EPILOG)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("build", "demo"),
    show_default=True,
    help="Where the page, the picture, the figures and everything they come from go.",
)
@click.option("--steps", type=click.IntRange(min=60), help="Inner steps of a fast island.  [default: by --budget]")
@click.option(
    "--budget",
    type=click.FloatRange(min=60),
    default=180.0,
    show_default=True,
    help="Seconds that it should take; decides the steps by this machine's speed.",
)
def demo(out: Path, steps: int | None, budget: float) -> None:
    """Train one model on three islands, kill a learner and the syncer on the way, and show what came of it.

    One island is three times slower. At a third of the way a fast one gets SIGKILL and rejoins later; at two thirds
    the syncer gets SIGKILL and restarts from its store. At the end stands a page with a picture, and summary.json. The
    exit status is 1 where the islands learned no more than one learner alone, a version doesn't replay, or a delta is
    unaccounted for.
    """
    from rich.console import Console

    from skerry.demo.processes import ChildError

    console = Console()
    begun_s = time.monotonic()
    try:
        with _interrupt_on_terminate():
            summary = _run(out.absolute(), steps, budget, console, begun_s)
    except ChildError as error:
        raise click.ClickException(str(error)) from error
    _say_result(console, summary, out)
    if summary.failures:
        raise click.exceptions.Exit(1)


def _run(directory: Path, steps: int | None, budget_s: float, console: Console, begun_s: float) -> Summary:
    import torch

    from skerry.client import RunsClient
    from skerry.demo.judgement import Judge
    from skerry.demo.live import LiveView
    from skerry.demo.page import write_page
    from skerry.demo.picture import draw
    from skerry.demo.plan import DemoPlan, TrainingPlan, affordable_steps
    from skerry.demo.processes import Nursery
    from skerry.demo.scenario import Scenario
    from skerry.demo.summary import summarise

    torch.set_num_threads(1)
    training = TrainingPlan()
    console.print("measuring this machine")
    judge = Judge(training)
    plan = DemoPlan(directory, steps or affordable_steps(judge.step_time_s(training), budget_s), training)
    console.print(
        f"training for {plan.step_count} steps, {training.batch_size} sequences each; logs in {directory}/logs"
    )

    def close_run(target: str, run: str) -> None:
        with RunsClient(target) as runs:
            runs.close_run(run)

    with Nursery(directory, _environment()) as nursery:
        with LiveView(console) as view:
            scenario = Scenario(plan, nursery, close_run=close_run, view=view)
            scenario.run()
        console.print("reading the log, replaying every version, judging the merged model along the way")
        evidence = _gather(scenario, nursery, judge, begun_s)
    summary = summarise(evidence)
    (directory / "summary.json").write_text(json.dumps(asdict(summary), indent=2) + "\n")
    draw(evidence, summary, directory / "demo.png")
    write_page(evidence, summary, picture=directory / "demo.png", path=directory / "index.html")
    return summary


def _gather(scenario: Scenario, nursery: Nursery, judge: Judge, begun_s: float) -> Evidence:
    from skerry.demo.summary import Evidence

    plan = scenario.plan
    history = asyncio.run(_read_history(plan))
    verified = nursery.output(
        "verify",
        ["verify", "--store", plan.store_url, "--run", plan.run, "--json"],
        accepted=(0, 1),
        timeout_s=_COMMAND_TIMEOUT_S,
    )
    (plan.directory / "verify.json").write_text(verified)
    initial_loss = _exported_loss(plan, nursery, judge, history.initial_position)
    return Evidence(
        plan=plan,
        timeline=scenario.timeline,
        single=scenario.single,
        learners=scenario.learners,
        history=history,
        merged=_judge_positions(plan, nursery, judge, history),
        initial_loss=initial_loss,
        single_loss=judge.loss_of_checkpoint(scenario.checkpoint_of_single()),
        verify_ok=bool(json.loads(verified)["ok"]),
        parameter_count=judge.parameter_count,
        duration_s=time.monotonic() - begun_s,
        core_count=os.cpu_count() or 1,
        load_average=os.getloadavg()[0],
    )


async def _read_history(plan: DemoPlan) -> History:
    from skerry.demo.history import read_history
    from skerry.store.operator.command import opened_log

    async with opened_log(plan.store_url, plan.run, None) as (log, _):
        return await read_history(log)


def _judge_positions(plan: DemoPlan, nursery: Nursery, judge: Judge, history: History) -> list[JudgedPosition]:
    from skerry.demo.judgement import JudgedPosition

    return [
        JudgedPosition(position, history.unix_s[position], _exported_loss(plan, nursery, judge, position))
        for position in history.positions_to_judge(_JUDGED_POSITIONS)
    ]


def _exported_loss(plan: DemoPlan, nursery: Nursery, judge: Judge, position: int) -> float:
    path = plan.directory / "exports" / f"{position}.safetensors"
    path.parent.mkdir(exist_ok=True)
    arguments = ["--store", plan.store_url, "--run", plan.run, "--position", str(position), "--out", str(path)]
    nursery.output("export", ["export", *arguments], timeout_s=_COMMAND_TIMEOUT_S)
    return judge.loss_of_export(path)


def _say_result(console: Console, summary: Summary, out: Path) -> None:
    console.print()
    for check in summary.checks:
        mark = "[green]held[/]" if check.is_met else "[red]failed[/]" if check.is_required else "[yellow]not here[/]"
        console.print(f"{mark}  {check.name}: {check.detail}", highlight=False)
    console.print(f"\n{out / 'index.html'}\n{out / 'demo.png'}\n{out / 'summary.json'}", highlight=False)


def _environment() -> dict[str, str]:
    """This process's environment, without settings of `skerry` that are meant for other runs than the demo's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SKERRY_")}
    # One thread a learner: three of them share what is often two cores, and waiting threads would take those.
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@contextmanager
def _interrupt_on_terminate() -> Iterator[None]:
    """Make SIGTERM unwind like SIGINT, so that no child outlives the demo."""

    def on_terminate(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, on_terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
