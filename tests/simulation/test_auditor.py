"""The auditor finds defects that are put in on purpose, so a campaign without findings means something."""

from __future__ import annotations

import pytest

from tests.simulation.mutations import MUTATIONS, QUICK_COUNT, Mutation, findings_of


@pytest.mark.parametrize("mutation", MUTATIONS[:QUICK_COUNT], ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_the_auditor_finds_a_product_that(mutation: Mutation) -> None:
    assert list(findings_of(mutation)), f"nobody noticed. rule={mutation.rule}"
