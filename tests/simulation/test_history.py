"""One seed is one history: the same in this process, and in another one that hashes strings another way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.simulation.judgement import judge

_ROOT = Path(__file__).parents[2]
_SEED = 3
_MIX = "everything-float32"


def test_a_seed_gives_the_same_history_twice() -> None:
    assert judge(_MIX, _SEED).digest == judge(_MIX, _SEED).digest


def test_seeds_give_different_histories() -> None:
    assert judge(_MIX, _SEED).digest != judge(_MIX, _SEED + 1).digest


def test_a_history_does_not_depend_on_how_strings_are_hashed() -> None:
    digest = judge(_MIX, _SEED).digest
    for hash_seed in ("0", "4242"):
        assert _digest_elsewhere(hash_seed) == digest


def _digest_elsewhere(hash_seed: str) -> str:
    program = f"from tests.simulation.judgement import judge; print(judge({_MIX!r}, {_SEED}).digest)"
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=_ROOT, env=environment, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()
