"""`skerry plan`: what a run will need, for each choice of H, P and codec, and which choices its learners can't bear."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product, starmap
from math import prod
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from rich.text import Text

from skerry import RunsClient
from skerry.cli.connection import with_client
from skerry.cli.console import as_json, console, count_text, json_line, rate_text, save_picture, size_text, table
from skerry.cli.plan_picture import draw
from skerry.cli.quantities import Fields, bits, field_values, named_fields, quantity
from skerry.exchange.session import policy_of
from skerry.model.fragment_plan import usual_fragment_count
from skerry.planning.figures import measured
from skerry.planning.formulas import UTILISATIONS, synchronous_bits_per_s, synchronous_name, synchronous_utilisation
from skerry.planning.plan import LearnerPlan, Plan, Prices, Setting, Site, plan
from skerry.runtime.options import OUTPUT_FILE, Parsed
from skerry.wire.codecs import Codec
from skerry.wire.layout import check_name
from skerry.wire.policy import Policy

T = TypeVar("T")

_SITE: Final[Fields] = {
    "step": ("step_s", quantity),
    "bandwidth": ("bandwidth_bits_per_s", bits),
    "price": ("price", quantity),
    "memory": ("memory_bytes", partial(quantity, unit="B")),
    "ranks": ("rank_count", quantity),
}
_SYNCER: Final[Fields] = {name: _SITE[name] for name in ("bandwidth", "price", "memory")}
_PRICES: Final[Fields] = {name: (name, quantity) for name in ("egress", "stored", "puts", "gets")}
_DEFAULT_H: Final = (24, 50, 100, 300)
_VERSIONS: Final = 8  # of each fragment of a live run, by which its updates are measured


def _listed(parse: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    return lambda text: tuple(dict.fromkeys(parse(item.strip()) for item in text.split(",")))


def _count(text: str) -> int:
    if not 1 <= (count := int(text[:20])) <= 1_000_000:
        raise ValueError(f"a count is 1 to 1,000,000. count={count}")
    return count


@dataclass(frozen=True)
class Basis:
    """What is planned from, as it is given or as a run measures itself; and H, P and codec where none are chosen."""

    parameters: float
    sites: Mapping[str, Site]
    defaults: tuple[tuple[int, ...], tuple[int, ...], tuple[Codec, ...]]
    policy: Policy
    bits: tuple[float, float] | None = None  # of a parameter, up and down, with the codec of `defaults`


@click.command(
    name="plan",
    epilog="""\b
A learner is NAME:FIELD=VALUE,…, syncers and prices are FIELD=VALUE,…:
  step         seconds of a training step
  bandwidth    of its link, each way, for example 2Gbit
  price        of an hour
  memory       of a process, each rank's, for example 80GB
  ranks        processes that train together
Prices: egress of a GB, stored of a GB for a month, puts and gets of a million requests.

\b
Columns:
  every, version  seconds between versions of a fragment; from a delta to its version at the slowest learner
  utilisation     share of the time that goes into steps which reach the run in time
  syncer, cores   memory and processors of a syncer that serves all; link: its traffic each way
  written, stored what a month writes to the store; what is there after a month
  puts, gets      requests to the store a month
  egress          what learners and syncer send in a month
  bits a step     up, down
  mean rate       of the busier way, which the link must have
  paper's peak    of one fragment that takes 2 steps, of P = H; two such are in flight
  memory, rank    of the learner beyond training; of one of its ranks
  for 50% …       the bandwidth for this utilisation, by Scaling Laws for DiLoCo

\b
Examples:
  skerry plan --parameters 12e9 --learner us:step=1.1,bandwidth=2Gbit,price=98 --learner eu:step=1.2,bandwidth=5Gbit
  skerry plan --parameters 1e9 --learner a:step=1 --learner b:step=1 --h 24,100,500 --codec int4,int8 --json
  skerry plan --parameters 12e9 --learner us:step=1,bandwidth=2Gbit,ranks=8,memory=200GB --plot plan.png
  skerry plan --from-run demo --learner us:bandwidth=1Gbit --prices egress=0.09,stored=0.023,puts=5,gets=0.4
""",
)
@click.option("--parameters", type=Parsed("count", quantity), help="Trained parameters, for example 12e9.")
@click.option(
    "--learner",
    "learners",
    type=Parsed("learner", partial(named_fields, known=_SITE)),
    multiple=True,
    metavar="NAME:FIELD=VALUE,…",
    help="A learner; repeated for each. With --from-run, what the run's learner of that name does not report.",
)
@click.option(
    "--syncer",
    type=Parsed("fields", partial(field_values, known=_SYNCER)),
    help="Bandwidth, memory and price of a syncer.",
)
@click.option("--prices", type=Parsed("fields", partial(field_values, known=_PRICES)), help="Prices, in any currency.")
@click.option(
    "--h", "inner_step_counts", type=Parsed("counts", _listed(_count)), help="Choices of H.  [default: 24,50,100,300]"
)
@click.option(
    "--fragments",
    "fragment_counts",
    type=Parsed("counts", _listed(_count)),
    help="Choices of P.  [default: the number that a new run of this size gets]",
)
@click.option(
    "--codec", "codecs", type=Parsed("codecs", _listed(Codec)), help="Of int4, int8, float32.  [default: int4]"
)
@click.option(
    "--from-run",
    type=Parsed("run", lambda text: check_name(text, kind="run")),
    help="Plan from what this run measures: its size, settings, learners, their pace, and bits a parameter.",
)
@click.option(
    "--plot", "picture", type=OUTPUT_FILE, help="Draw utilisation over bandwidth to this file, such as a.png."
)
@as_json
@with_client
def plan_command(
    client: RunsClient,
    *,
    parameters: float | None,
    learners: tuple[tuple[str, dict[str, Any]], ...],
    syncer: dict[str, Any] | None,
    prices: dict[str, float] | None,
    inner_step_counts: tuple[int, ...] | None,
    fragment_counts: tuple[int, ...] | None,
    codecs: tuple[Codec, ...] | None,
    from_run: str | None,
    picture: Path | None,
    is_json: bool,
) -> None:
    """Plan a run: traffic, utilisation, memory, storage and cost for each choice of H, fragments and codec.

    Choices that a learner or the syncer can't bear are refused with the reason. docs/planning.md has the formulas, and
    where each of its figures comes from. Without --from-run no syncer is asked.
    """
    if (parameters is None) == (from_run is None):
        raise click.UsageError("give either --parameters and a --learner NAME:step=SECONDS, or --from-run RUN")
    if parameters is None:
        basis = _measured_run(client, from_run or "")
    else:
        defaults = (_DEFAULT_H, (usual_fragment_count(int(parameters)),), (Codec.INT4,))
        basis = Basis(parameters, {}, defaults, Policy())
    sites = dict(basis.sites)
    for name, fields in learners:
        sites[name] = replace(sites.get(name, Site(name)), **fields)
    if not sites:
        raise click.UsageError("there is no learner: give --learner NAME:step=SECONDS")
    if unpaced := [site.name for site in sites.values() if not site.step_s]:
        raise click.UsageError(f"the time of a step is not known: give --learner {unpaced[0]}:step=SECONDS")
    chosen = zip((inner_step_counts, fragment_counts, codecs), basis.defaults, strict=True)
    plans = [
        plan(
            basis.parameters,
            tuple(sites.values()),
            setting,
            measured(setting.codec),
            bits=basis.bits if setting.codec in basis.defaults[2] else None,
            syncer=Site("syncer", **(syncer or {})),
            prices=Prices(**(prices or {})),
            policy=basis.policy,
        )
        for setting in starmap(Setting, product(*(choices or default for choices, default in chosen)))
    ]
    step_s = max(site.step_s for site in sites.values())
    known = [site.bandwidth_bits_per_s for site in sites.values() if site.bandwidth_bits_per_s]
    references = [
        _reference(basis.parameters, step_s, min(known, default=None), h)
        for h in (1, *sorted({each.setting.inner_step_count for each in plans}))
    ]
    if picture is not None:
        save_picture(draw(basis.parameters, step_s, plans), picture)
    if is_json:
        click.echo(json_line({"parameters": basis.parameters, "plans": plans, "synchronous": references}))
        return
    _show(plans, references)


def _measured_run(client: RunsClient, name: str) -> Basis:
    """Returns what a run measures, from its newest versions and its learners' reports."""
    answer = client.get_run(name)
    run, policy = answer.run, policy_of(answer.run.policy, Policy())
    numel = {tensor.name: prod(tensor.shape) for tensor in run.tensors}
    sizes = {fragment.name: sum(numel[tensor] for tensor in fragment.tensors) for fragment in run.fragments}
    learners = {learner.learner_id: learner for learner in answer.learners if learner.is_live}
    sites = {key: Site(key, learner.report.step_time.ToNanoseconds() / 1e9) for key, learner in learners.items()}
    updates = [
        (record.update_size_bytes, size)
        for fragment, size in sizes.items()
        for record in islice(client.list_versions(name, fragment), _VERSIONS)
        if record.update_size_bytes
    ]
    deltas = sum(fate.delta_count for learner in learners.values() for fate in learner.fates)
    sent_bytes = sum(learner.report.sent_bytes for learner in learners.values())
    total = float(sum(sizes.values()))
    bits = None
    if updates and deltas and sent_bytes:
        up = 8 * sent_bytes / (deltas * total / len(sizes))
        bits = (up, 8 * sum(size_bytes for size_bytes, _ in updates) / sum(size for _, size in updates))
    settings = (policy.inner_step_count,), (len(sizes),), (policy.delta_encoding.codec,)
    return Basis(total, sites, settings, policy, bits)


def _reference(parameters: float, step_s: float, bits_per_s: float | None, inner_step_count: int) -> dict[str, Any]:
    """Returns what training that waits needs, and what it does on such a link."""
    needed = {str(u): synchronous_bits_per_s(parameters, step_s, u, inner_step_count) for u in UTILISATIONS}
    given = bits_per_s and synchronous_utilisation(parameters, step_s, bits_per_s, inner_step_count)
    return {"name": synchronous_name(inner_step_count), "utilisation": given, "bits_per_s_by_utilisation": needed}


def _show(plans: Sequence[Plan], references: Sequence[Mapping[str, Any]]) -> None:
    screen = console()
    screen.print(table([_run_row(each) for each in plans]), "")
    screen.print(table([_learner_row(each, learner) for each in plans for learner in each.learners]), "")
    if refused := [Text(f"{each.setting} is refused. {text}", style="red") for each in plans for text in each.refusals]:
        screen.print(*refused, "", sep="\n")
    screen.print(table([_reference_row(reference) for reference in references]))
    screen.print(
        Text(
            "utilisation counts step() as measured on a CPU; columns: skerry plan --help; formulas: docs/planning.md",
            style="dim",
        )
    )


def _run_row(each: Plan) -> dict[str, str | Text]:
    return {
        "setting": str(each.setting),
        "": Text("refused", style="red") if each.refusals else Text("ok", style="green"),
        "utilisation": f"{min(learner.utilisation for learner in each.learners):.1%}",
        "every": f"{each.version_interval_s:.3g} s",
        "version": f"{each.version_s:.3g} s",
        "syncer": size_text(each.syncer_memory_bytes),
        "cores": f"{each.syncer_core_count:.2g}",
        "link": rate_text(each.syncer_bits_per_s),
        "written": size_text(each.written_bytes_per_month),
        "stored": size_text(each.stored_bytes),
        "puts": count_text(round(each.puts_per_month)),
        "gets": count_text(round(each.gets_per_month)),
        "egress": size_text(each.egress_bytes_per_month),
        "cost": _cost_text(each.cost_per_month),
    }


def _learner_row(each: Plan, learner: LearnerPlan) -> dict[str, str | Text]:
    up, down = (count_text(round(bits)) for bits in (learner.up_bits_per_step, learner.down_bits_per_step))
    return {
        "setting": str(each.setting),
        "learner": learner.name,
        "bits a step": f"{up}, {down}",
        "mean rate": rate_text(learner.bits_per_s),
        "paper's peak": rate_text(learner.paper_bits_per_s),
        "given": rate_text(learner.bandwidth_bits_per_s),
        "utilisation": f"{learner.utilisation:.1%}",
        "memory": size_text(learner.memory_bytes),
        "rank": size_text(learner.rank_memory_bytes),
        "cores": f"{learner.core_count:.2g}",
        "egress": size_text(learner.egress_bytes_per_month),
        "cost": _cost_text(learner.cost_per_month),
    }


def _reference_row(reference: Mapping[str, Any]) -> dict[str, str | Text]:
    utilisation = reference["utilisation"]
    row = {"without Skerry": reference["name"], "utilisation": "-" if utilisation is None else f"{utilisation:.1%}"}
    needed = reference["bits_per_s_by_utilisation"]
    return row | {f"for {float(share):.0%}": rate_text(bits_per_s) for share, bits_per_s in needed.items()}


def _cost_text(cost: float | None) -> str:
    return "-" if cost is None else f"{cost:,.0f}"
