"""Every mix of faults, a few seeds each: whatever went wrong, the auditor finds nothing."""

from __future__ import annotations

import pytest

from tests.simulation.judgement import judge
from tests.simulation.mixes import MIXES


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("mix", MIXES)
def test_a_run_is_sound_whatever_goes_wrong(mix: str, seed: int) -> None:
    verdict = judge(mix, seed)
    assert not verdict.findings, f"\n{verdict}"
    assert verdict.version_count > 3, "nothing happened that could have gone wrong"
