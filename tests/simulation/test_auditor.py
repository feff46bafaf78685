"""The auditor finds defects that are put in on purpose, so a campaign without findings means something."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from skerry_syncer.store.log.entries import AcceptedItem, Entry
from tests.simulation.auditor import audit
from tests.simulation.evidence import Evidence
from tests.simulation.mixes import MIXES
from tests.simulation.mutations import MUTATIONS, Mutation, findings_of
from tests.simulation.world import live


@pytest.mark.long
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_auditor_finds_a_product_that(mutation: Mutation) -> None:
    assert list(findings_of(mutation)), f"nobody noticed. rule={mutation.rule}"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_every_defect_is_put_where_the_product_is(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation.apply(monkeypatch)


@pytest.mark.long
def test_what_was_collected_goes_unread() -> None:
    evidence = live(1, MIXES["retention"])
    assert any(path.endswith(tuple(_parts(evidence))) for path in evidence.deleted)
    assert asyncio.run(audit(replace(evidence, deleted={}))) == []


@pytest.mark.long
def test_the_auditor_finds_a_part_that_was_lost() -> None:
    evidence = live(1, MIXES["restarts"])
    parts = tuple(_parts(evidence))
    for path in [path for path in evidence.stored if path.endswith(parts)]:
        del evidence.stored[path]
    rules = {finding.rule for finding in asyncio.run(audit(evidence))}
    assert "what was accepted stays until it is collected" in rules, rules


def _parts(evidence: Evidence) -> set[str]:
    """Returns the names of the parts of all accepted deltas."""
    items = [item for name in evidence.landed for item in Entry.from_bytes(evidence.stored[name][0]).items]
    return {part.name for item in items if isinstance(item, AcceptedItem) for part in item.parts}
