"""`skerry simulate`: what failures, outages and unequal learners cost a run, before it begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
from rich.text import Text

from skerry.cli import policy_text
from skerry.cli.console import as_json, console, json_line, save_picture, shown_progress, table
from skerry.cli.quantities import Fields, bits, named_fields, quantity, seconds
from skerry.runtime.options import OUTPUT_FILE, Count, Parsed
from skerry.wire.layout import check_name
from skerry.wire.policy import Policy
from skerry_syncer.simulation.history import History, cost
from skerry_syncer.simulation.picture import draw
from skerry_syncer.simulation.scenario import SLICE_CHIPS, STORE, SYNCER, Outage, Region, Scenario, spot_outages
from skerry_syncer.simulation.world import World


def _outage(text: str, *, is_cut: bool = False) -> Outage:
    place, _, times = text.partition("@")
    start, _, duration = times.partition("+")
    if not duration:
        raise ValueError(f"{text[:40]!r} is not PLACE@START+DURATION, such as us@1h+30m")
    return Outage(check_name(place, kind="region"), seconds(start), seconds(duration), is_cut)


_REGION: Final[Fields] = {
    "step": ("step_s", seconds),
    "count": ("count", quantity),
    "chips": ("chip_count", quantity),
    "loss": ("failure_loss_s", seconds),
    "slice": ("slice_chip_count", quantity),
    "repair": ("repair_s", seconds),
    "mtbf": ("chip_mtbf_s", seconds),
    "bandwidth": ("bandwidth_bits_per_s", bits),
    "jitter": ("jitter", quantity),
    "join": ("join_s", seconds),
    "leave": ("leave_s", seconds),
}
# The published case: eight learners on 1.2 million chips.
_DEFAULT: Final = tuple(
    (f"r{number}", {"chip_count": 150e3, "slice_chip_count": SLICE_CHIPS}) for number in range(1, 9)
)


@click.command(
    epilog="""\b
A learner is REGION:FIELD=VALUE,…, and a region is what an outage takes away together:
  step         seconds of a training step, 1 if not given
  count        so many learners alike
  chips        of each; without chips nothing fails
  loss, mtbf   how long a chip's failure stops its learner, 20.5s, and how often a chip fails, once in 365.25d
  slice        chips that are away after a failure while the learner goes on, none if not given; repair: how long, 75s
  bandwidth    of each one's link, each way; matters with --parameters
  jitter       standard deviation of the step time from one round to the next, as a share
  join, leave  when they come and go, for example 2h

\b
Columns:
  training       share of the allocated time that goes into steps
  goodput        share of it that goes into steps which are merged
  participation  mean weight of a round's deltas among all that could be in it
  staleness      of a merged delta in versions, mean and worst
  merged steps   of all learners
  cost           merged steps that outages and markets cost; others: of it, of regions that none takes away

\b
Examples:
  skerry simulate                                              8 learners on 1.2 million chips
  skerry simulate --outage r1@1h+30m --outage r2@1h+30m --plot outage.png
  skerry simulate --cut r1@1h+2m
  skerry simulate --learner us:step=1.1,count=4 --learner eu:step=1.3,count=4,jitter=0.1 --set quorum_count=8
  skerry simulate --learner own:count=4 --learner spot:count=4 --spot spot --duration 4h --json
  skerry simulate --outage syncer@30m+10m --outage store@1h+5m
""",
)
@click.option(
    "--learner",
    "learners",
    type=Parsed("learner", partial(named_fields, known=_REGION)),
    multiple=True,
    metavar="REGION:FIELD=VALUE,…",
    help="Learners of a region; repeated for each.  [default: r1 to r8 of 150,000 chips]",
)
@click.option(
    "--outage",
    "outages",
    type=Parsed("outage", _outage),
    multiple=True,
    metavar="PLACE@START+DURATION",
    help="A region's learners, `syncer` or `store` are away; may be repeated.",
)
@click.option(
    "--cut",
    "cuts",
    type=Parsed("cut", partial(_outage, is_cut=True)),
    multiple=True,
    metavar="REGION@START+DURATION",
    help="A region's learners are cut off, and train on; may be repeated.",
)
@click.option(
    "--spot",
    "spots",
    type=Parsed("region", lambda text: check_name(text, kind="region")),
    multiple=True,
    metavar="REGION",
    help="A spot market gives and takes the region's capacity; may be repeated.",
)
@click.option("--duration", type=Parsed("time", seconds), default="2h", show_default=True, help="Virtual time.")
@click.option("--parameters", type=Parsed("count", quantity), help="Trained parameters, for the time of transfers.")
@click.option("--fragments", type=Count(1), default=2, show_default=True, help="Fragments; many take long.")
@click.option(
    "--set",
    "assignments",
    type=Parsed("assignment", lambda text: policy_text.apply([text], Policy()) and text),
    multiple=True,
    metavar="NAME=VALUE",
    help="Set a field of the policy, for example quorum_count=8 or inner_step_count=100. May be repeated.",
)
@click.option("--seed", type=Count(0), default=0, show_default=True, help="The same seed gives the same history.")
@click.option("--plot", "picture", type=OUTPUT_FILE, help="Draw the history to this file, such as a.png.")
@as_json
def simulate(
    *,
    learners: Sequence[tuple[str, dict[str, Any]]],
    outages: Sequence[Outage],
    cuts: Sequence[Outage],
    spots: Sequence[str],
    duration: float,
    parameters: float | None,
    fragments: int,
    assignments: Sequence[str],
    seed: int,
    picture: Path | None,
    is_json: bool,
) -> None:
    """Simulate a run's rounds in virtual time: what failures, outages and unequal learners cost.

    The round engine and the log are the product's; nothing is trained or sent. docs/simulation.md has what is modelled.
    """
    known = [Region(name, **fields) for name, fields in learners or _DEFAULT]
    names = [*(region.name for region in known), SYNCER, STORE]
    if len(set(names)) < len(names):
        raise click.UsageError(f"give each --learner a region of its own; {SYNCER} and {STORE} are none")
    places, regions = {outage.place for outage in outages}, {*(cut.place for cut in cuts), *spots}
    if unknown := (places - set(names)) | (regions - set(names[:-2])):
        raise click.UsageError(f"no --learner is in {min(unknown)}; known: {', '.join(names)}")
    if late := [outage.place for outage in (*outages, *cuts) if outage.start_s >= duration]:
        raise click.UsageError(f"the outage of {late[0]} begins when the simulation is over: give a longer --duration")
    calm = Scenario(
        tuple(known),
        duration,
        policy_text.apply(assignments, Policy()),
        fragment_count=fragments,
        parameters=parameters or 0.0,
        seed=seed,
    )
    markets = [outage for name in spots for outage in spot_outages(name, duration, seed)]
    scenario = replace(calm, outages=(*outages, *cuts, *markets))
    with shown_progress("virtual seconds") as progress:
        history = World(scenario).run(progress)
        without = World(calm).run(progress) if scenario.outages else None
    if picture is not None:
        save_picture(draw(history, without), picture)
    if is_json:
        values = {
            "summary": history.summary(),
            "without_outages": without and without.summary(),
            "cost": without and cost(history, without),
            "regions": {region.name: history.shares(region.name) for region in known},
            "outages": scenario.outages,
            "over_time": history.over_time(),
        }
        click.echo(json_line(values))
        return
    _show(history, without)


def _show(history: History, without: History | None) -> None:
    screen = console()
    regions = {region.name: history.shares(region.name) for region in history.scenario.regions}
    screen.print(table([{"region": name, **_row(shares)} for name, shares in regions.items()]), "")
    both = {"all": history} | ({"without outages": without} if without else {})
    screen.print(table([{"": name, **_row(each.summary())} for name, each in both.items()]))
    if without:
        counts = cost(history, without)
        text = "cost: {merged_step_count:,.0f} merged steps, {others_merged_step_count:,.0f} of them of others"
        screen.print(Text(text.format(**counts), style="bold"))
    screen.print(Text("columns: skerry simulate --help; what is modelled: docs/simulation.md", style="dim"))


def _row(seen: dict[str, float]) -> dict[str, str | Text]:
    row: dict[str, str | Text] = {name: f"{seen[name]:.1%}" for name in ("training", "goodput")}
    if "participation" in seen:
        row["participation"] = f"{seen['participation']:.3f}"
        row["staleness"] = f"{seen['staleness']:.2f}, {seen['worst_staleness']}"
        row["versions"] = f"{seen['version_count']:,}"
    return row | {"merged steps": f"{seen['merged_step_count']:,.0f}"}
