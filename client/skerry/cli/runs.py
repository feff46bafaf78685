"""`skerry runs` and `skerry rollback`: create, show, change, close, delete and roll back runs."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import click
from rich.console import RenderableType
from rich.text import Text

from skerry import RunsClient
from skerry.cli import policy_text
from skerry.cli.connection import UID, with_client, with_run
from skerry.cli.console import as_json, console, count_text, json_line, shown_progress, size_text, table
from skerry.cli.watch_view import draw
from skerry.cli.weights import read_weights
from skerry.exchange.session import policy_of
from skerry.history.run_history import history_now, status_word
from skerry.runtime.options import INPUT_FILE, Count, Parsed
from skerry.v1.runs_pb2 import Contribution, GetRunResponse, VersionRecord
from skerry.v1.types_pb2 import Run, Tensor
from skerry.wire.layout import check_name
from skerry.wire.messages import to_values
from skerry.wire.policy import Policy

# What a command says: as JSON values, and in parts for a person.
Answer: TypeAlias = tuple[Mapping[str, Any] | list[Any], Iterable[RenderableType]]


def _assignment(text: str) -> str:
    policy_text.apply([text], Policy())
    return text


_set = click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="NAME=VALUE",
    type=Parsed("assignment", _assignment),
    help="Set a field of the policy, for example inner_step_count=30 or outer.learning_rate=0.4. May be repeated.",
)

_learner = click.argument("learner", type=Parsed("learner", partial(check_name, kind="learner")))


def _printing(function: Callable[..., Answer]) -> Callable[..., None]:
    """Gives a command the flag `--json`, and prints what it returns."""

    @as_json
    @functools.wraps(function)
    def command(*args: Any, is_json: bool, **kwargs: Any) -> None:
        values, parts = function(*args, **kwargs)
        if is_json:
            click.echo(json_line(values))
            return
        for part in parts:
            if isinstance(part, str):
                click.echo(part)
            else:
                console().print(part)

    return command


@click.group(
    epilog="""\b
Examples:
  skerry runs list
  skerry runs show demo
  skerry runs policy demo --set quorum_count=2
"""
)
def runs() -> None:
    """Create, show, change, close and delete runs."""


@runs.command("list", epilog="\b\nExample:\n  skerry runs list --json | jq -r '.[].name'")
@_printing
@with_client
def list_(client: RunsClient) -> Answer:
    """List the runs of a syncer."""
    listed = client.list_runs()
    rows = [
        {
            "run": run.name,
            "status": status_word(run.status),
            "parameters": count_text(_parameter_count(run.tensors)),
            "fragments": str(len(run.fragments)),
            "versions": _version_range(run),
            "position": str(run.position),
            "created": _created_at(run),
        }
        for run in listed
    ]
    none = "there are no runs. A learner creates one when it starts: skerry learn NAME"
    return [_summary(run) for run in listed], [table(rows) if rows else none]


@runs.command(epilog="\b\nExample:\n  skerry runs show demo")
@with_run
@with_client
@_printing
def show(client: RunsClient, run: str) -> Answer:
    """Show a run: its fragments, versions, learners and policy."""
    answer = client.get_run(run)
    return to_values(answer), _shown(client, answer)


def _shown(client: RunsClient, answer: GetRunResponse) -> Iterator[RenderableType]:
    run = answer.run
    yield draw(history_now(client, answer))
    size = f"{count_text(_parameter_count(run.tensors))} parameters"
    yield Text(f"uid {run.uid}  {size}  created {_created_at(run)}\n", style="dim")
    yield _policy(policy_of(run.policy, Policy()))


@runs.command(epilog="\b\nExample:\n  skerry runs versions demo --fragment embedding --limit 20")
@with_run
@click.option(
    "--fragment",
    required=True,
    type=Parsed("fragment", partial(check_name, kind="fragment")),
    help="The fragment's name; `skerry runs show` lists them.",
)
@click.option("--limit", type=Count(1, 1000), default=20, help="How many versions to list.")
@_printing
@with_client
def versions(client: RunsClient, run: str, *, fragment: str, limit: int) -> Answer:
    """List a fragment's versions, newest first, and the learners whose deltas each was merged from."""
    records = list(itertools.islice(client.list_versions(run, fragment), limit))
    rows = [
        {
            "version": str(record.version.version),
            "position": str(record.position),
            "merged from": _origin(record),
            "update": size_text(record.update_size_bytes) if record.update_size_bytes else "-",
            "snapshot": "yes" if record.has_snapshot else "",
            "": "abandoned" if record.is_abandoned else "",
        }
        for record in records
    ]
    return [to_values(record) for record in records], [table(rows)]


@runs.command(epilog="\b\nExample:\n  skerry runs create gemma --weights initial.safetensors --set quorum_count=2")
@with_run
@click.option(
    "--weights",
    required=True,
    type=INPUT_FILE,
    help="A safetensors file with the model's tensors.",
)
@_set
@_printing
@with_client
def create(client: RunsClient, run: str, *, weights: Path, assignments: tuple[str, ...]) -> Answer:
    """Create a run from initial weights. A learner can also create it when it starts."""
    try:
        arrays = read_weights(weights)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--weights") from error
    created = client.create_run(run, arrays, policy=policy_text.apply(assignments, Policy()))
    size = f"{count_text(_parameter_count(created.tensors))} parameters in {len(created.fragments)} fragments"
    return _summary(created), [f"created {created.name} ({created.uid}): {size}"]


@runs.command(
    epilog="""\b
Examples:
  skerry runs policy demo
  skerry runs policy demo --set quorum_count=2 --set outer.learning_rate=0.4
  skerry runs policy demo --set merge_by_fragment.embedding=mean
"""
)
@with_run
@_set
@_printing
@with_client
def policy(client: RunsClient, run: str, *, assignments: tuple[str, ...]) -> Answer:
    """Show a run's policy, or change it. A change takes effect when the next round closes."""
    current = client.get_policy(run)
    if assignments:
        current = client.set_policy(run, policy_text.apply(assignments, current), base=current)
    return policy_text.to_json(current), [_policy(current)]


@runs.command(epilog="\b\nExamples:\n  skerry runs pin demo\n  skerry runs pin demo --position 4711 --remove")
@with_run
@click.option("--position", type=Count(1), help="A log position.  [default: the newest]")
@click.option("--remove", is_flag=True, help="Let collections take the weights of the position again.")
@_printing
@with_client
def pin(client: RunsClient, run: str, *, position: int | None, remove: bool) -> Answer:
    """Keep the weights that a run has at a log position for ever, for roll-backs and exports."""
    current = client.get_run(run).run
    policy = policy_of(current.policy, Policy())
    pin, pins = {position or current.position}, set(policy.pinned_positions)
    wanted = replace(policy, pinned_positions=tuple(sorted(pins - pin if remove else pins | pin)))
    pinned = client.set_policy(run, wanted, base=policy).pinned_positions
    return list(pinned), [f"pinned positions: {', '.join(map(str, pinned)) or 'none'}"]


@runs.command(epilog="\b\nExample:\n  skerry runs eject demo us-east")
@with_run
@_learner
@_printing
@with_client
def eject(client: RunsClient, run: str, *, learner: str) -> Answer:
    """Eject a learner: its deltas that are not merged yet expire, and every replica refuses it until it is readmitted.

    What was merged of it stays; `skerry rollback` takes versions back. Without certificates a learner can come back
    under another id.
    """
    return to_values(client.eject(run, learner)), [f"ejected {learner} from {run}"]


@runs.command(epilog="\b\nExample:\n  skerry runs readmit demo us-east")
@with_run
@_learner
@_printing
@with_client
def readmit(client: RunsClient, run: str, *, learner: str) -> Answer:
    """Readmit a learner that was ejected: it can attach again when it is started again."""
    return to_values(client.readmit(run, learner)), [f"readmitted {learner} to {run}"]


@runs.command(epilog="\b\nExample:\n  skerry runs account demo --json | jq '.organisations'")
@with_run
@_printing
@with_client
def account(client: RunsClient, run: str) -> Answer:
    """Sum up what each learner and each organisation contributed to a run's newest versions.

    Tokens and steps are those of the merged deltas, as the mean over fragments; the share of the weight is the mean
    over versions. What a roll-back abandoned does not count. An organisation is what a learner's certificate has as O.
    """
    rows = client.account(run)
    learners = [row for row in rows if row.learner_id]
    organisations = [row for row in rows if not row.learner_id]
    values = {"learners": [to_values(row) for row in learners]}
    values["organisations"] = [to_values(row) for row in organisations]
    parts: list[RenderableType] = ["nothing is merged yet"] if not rows else []
    parts += [table([{"learner": row.learner_id, **_contribution(row)} for row in learners])] if rows else []
    if any(row.organisation for row in organisations):
        parts += ["", table([_contribution(row) for row in organisations])]
    return values, parts


def _contribution(row: Contribution) -> dict[str, str]:
    return {
        "organisation": row.organisation or "-",
        "tokens": count_text(round(row.token_count)),
        "steps": count_text(round(row.step_count)),
        "weight": f"{row.weight_share:.1%}",
        "versions": str(row.version_count),
    }


@runs.command(epilog="\b\nExample:\n  skerry runs close demo && skerry export demo --out demo.safetensors")
@with_run
@_printing
@with_client
def close(client: RunsClient, run: str) -> Answer:
    """Close a run: pending deltas are merged or expire, then the run is read-only. Waits until it is closed."""
    closed = client.close_run(run)
    return _summary(closed), [f"closed {closed.name} at position {closed.position}, versions {_version_range(closed)}"]


@runs.command(epilog="\b\nExample:\n  skerry runs delete demo --yes")
@with_run
@click.option(
    "--uid", type=UID, help="Delete the run only if it has this uid, so that a repeated delete spares a newer run."
)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@with_client
def delete(client: RunsClient, run: str, *, uid: str | None, yes: bool) -> None:
    """Delete a run: its name is free at once, its objects stay in the store until `skerry gc` removes them."""
    doomed = client.get_run(run, uid=uid).run
    if not yes:
        click.confirm(
            f"delete {doomed.name} ({doomed.uid}, {count_text(_parameter_count(doomed.tensors))} parameters, "
            f"versions {_version_range(doomed)})?",
            abort=True,
        )
    client.delete_run(run, doomed.uid)
    click.echo(f"deleted {doomed.name} ({doomed.uid})")


@click.command(
    epilog="""\b
Examples:
  skerry log demo --last 20      shows the positions
  skerry rollback demo --to 1200
"""
)
@with_run
@click.option("--to", "position", required=True, type=Count(1), help="The log position to go back to.")
@_printing
@with_client
def rollback(client: RunsClient, *, run: str, position: int) -> Answer:
    """Roll a run back: each fragment gets a new version with the content that it had at an earlier log position.

    Version numbers continue and are never reused; learners adopt the new versions and train on. Deltas that are
    pending, or that are based on abandoned versions, expire.

    A large run takes minutes. Until they are over nothing changes, and the command may be interrupted.
    """
    with shown_progress("storing fragments") as progress:
        rolled = client.roll_back(run, position, progress=progress)
    now = f"now position {rolled.position}, versions {_version_range(rolled)}"
    return _summary(rolled), [f"rolled {rolled.name} back to position {position}: {now}"]


def _summary(run: Run) -> dict[str, object]:
    """Returns a run as JSON values, with counts in place of its tensors and fragments."""
    values = to_values(run)
    values["parameter_count"] = _parameter_count(run.tensors)
    values["fragment_count"] = len(run.fragments)
    del values["tensors"], values["fragments"]
    return values


def _policy(policy_now: Policy) -> RenderableType:
    return table([{"policy": name, "value": value} for name, value in policy_text.rows(policy_now)])


def _origin(record: VersionRecord) -> str:
    if record.source_version >= 0:
        return f"roll-back to version {record.source_version}"
    if not record.merged:
        return "forgotten" if record.version.version else "initial weights"
    return ", ".join(
        f"{delta.learner_id} {delta.weight_share:.0%}" + (f" (stale by {delta.staleness})" if delta.staleness else "")
        for delta in record.merged
    )


def _version_range(run: Run) -> str:
    numbers = [version.version for version in run.versions]
    if not numbers:
        return "-"
    return str(min(numbers)) if min(numbers) == max(numbers) else f"{min(numbers)}-{max(numbers)}"


def _parameter_count(tensors: Iterable[Tensor]) -> int:
    return sum(math.prod(tensor.shape) for tensor in tensors)


def _created_at(run: Run) -> str:
    return f"{run.created_at.ToDatetime():%Y-%m-%d %H:%M}" if run.HasField("created_at") else "-"
