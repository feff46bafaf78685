"""The short form of `python -m tests.attacks`: beside each attack an honest learner goes on."""

from __future__ import annotations

from typing import Final

import pytest

from tests.attacks.attacks import ATTACKS
from tests.attacks.beside import beside

pytestmark = [pytest.mark.e2e, pytest.mark.alone, pytest.mark.timeout(300)]  # 500 runs are created for one of them

_SECONDS: Final = 3.0
# Of the merges in peace; `python -m tests.attacks` has the real bound, which needs a quiet machine.
_LEAST_SHARE: Final = 0.1


@pytest.mark.parametrize("name", ATTACKS)
async def test_a_learner_goes_on_beside(name: str) -> None:
    row = await beside(name, _SECONDS)
    assert row.is_held(_LEAST_SHARE * row.peace), row
    assert row.peace > 1
