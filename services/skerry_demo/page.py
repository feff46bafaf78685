"""The demo's page: one HTML file that contains its picture and loads nothing else."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Final

import jinja2

from skerry_demo.summary import Evidence, Summary

_IN_TABLES_OF_THEIR_OWN: Final = frozenset({"learners", "checks"})


def write_page(evidence: Evidence, summary: Summary, *, picture: Path, path: Path) -> None:
    """Write the page to `path`, with the image at `picture` in it."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("skerry_demo", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    events = evidence.timeline.events.values()
    page = environment.get_template("page.html.j2").render(
        s=summary,
        slowest=max(learner.slowdown for learner in evidence.plan.learners),
        picture=base64.b64encode(picture.read_bytes()).decode(),
        events=[(evidence.timeline.since_start_s(event.unix_s), event.text) for event in events],
        figures=list(_figures(summary)),
        next_commands=_next_commands(evidence),
    )
    path.write_text(page, encoding="utf-8")


def _figures(summary: Summary) -> Iterator[tuple[str, str]]:
    for item in fields(summary):
        if item.name not in _IN_TABLES_OF_THEIR_OWN:
            yield item.name, _shown(getattr(summary, item.name))


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(item)}" for name, item in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _next_commands(evidence: Evidence) -> str:
    run, store = evidence.plan.run, evidence.plan.store_url
    return f"""# the last entries of the run's log: which deltas made which version
skerry log {run} --store {store} --last 20

# the merged model as a checkpoint
skerry export {run} --store {store} --out model.safetensors

# a run of your own: a syncer, two learners and a live view, each in a terminal of its own
skerry serve --new-store --store file://$PWD/data
skerry learn mine --learner-id us-east --shard 1/2
skerry learn mine --learner-id eu-west --shard 2/2
skerry watch mine"""
