"""A loop of one's own with accelerate as a learner."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from tests.e2e.trainers.two_islands import assert_merged, train_two_islands


def test_two_islands_one_is_killed_and_the_merged_model_loads(target: str, tmp_path: Path) -> None:
    out = train_two_islands("accelerate_loop", target, "accelerate", tmp_path)
    assert_merged(target, "accelerate", load_file(out / "model.safetensors"))
