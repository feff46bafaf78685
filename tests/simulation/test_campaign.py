"""Every mix of faults, a few seeds each: whatever went wrong, the auditor finds nothing, and a seed is one history."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest

from tests.simulation.campaign import judge
from tests.simulation.mixes import MIXES
from tests.simulation.world import live

_MIX, _SEED = "everything-float32", 3


@pytest.mark.parametrize(
    ("mix", "seed"),
    [
        # The two mixes of everything hold most faults; each fault by itself takes too long for the default suite.
        pytest.param(mix, seed, marks=() if mix.startswith("everything") and seed == 0 else pytest.mark.long)
        for mix in MIXES
        for seed in (0, 1)
    ],
)
def test_a_run_is_sound_whatever_goes_wrong(mix: str, seed: int) -> None:
    verdict = judge(mix, seed)
    assert not verdict.findings, f"\n{verdict}"
    assert verdict.version_count > 3, "nothing happened that could have gone wrong"


@pytest.mark.long
def test_a_seed_is_one_history_however_strings_are_hashed() -> None:
    digest = judge(_MIX, _SEED).digest
    assert digest == judge(_MIX, _SEED).digest != judge(_MIX, _SEED + 1).digest
    program = f"from tests.simulation.campaign import judge; print(judge({_MIX!r}, {_SEED}).digest)"
    for hash_seed in ("0", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        assert done.stdout.strip() == digest


def test_where_nothing_fails_one_of_three_replicas_merges_each_version() -> None:
    # Every merge writes an update of its own, whether its commit is admitted or not.
    merges = Counter(name.rpartition("-")[0] for name in live(0, MIXES["calm"]).stored if "/updates/" in name)
    assert len(merges) > 40
    assert [version for version, count in merges.items() if count > 1] == []
