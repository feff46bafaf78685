"""The auditor finds what is broken on purpose; a green campaign means something."""

from __future__ import annotations

import pytest

from tests.simulation.mutations import MUTATIONS, QUICK_COUNT, Mutation, betrayals


@pytest.mark.parametrize("mutation", MUTATIONS[:QUICK_COUNT], ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_the_auditor_finds_a_product_that(mutation: Mutation) -> None:
    assert list(betrayals(mutation)), f"nobody noticed. rule={mutation.rule}"
