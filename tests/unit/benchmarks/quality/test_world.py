"""The quality benchmark's world: the product in virtual time around real training, the same for every seed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.quality import world
from benchmarks.quality.arms import Island, islands
from benchmarks.quality.bulk_transport import BulkTransport
from benchmarks.quality.world import train_islands

pytestmark = pytest.mark.long

STEPS = 24
RATE = 1e-2
H8 = {"inner_step_count": 8}


def test_one_seed_gives_one_outcome() -> None:
    arm = islands(2, STEPS, RATE, policy=H8)
    first, second = train_islands(arm, 3), train_islands(arm, 3)
    assert first == second
    assert math.isfinite(first.losses["python"])
    assert train_islands(arm, 4).losses != first.losses


def test_equal_islands_are_merged_together() -> None:
    figures = train_islands(islands(4, 40, RATE, policy=H8, judged_on=()), 0).figures
    assert figures["deltas"] == figures["merged"]
    assert figures["members"] > 3.9
    assert figures["steps_a_delta"] > 7


def test_a_delay_is_the_steps_until_adoption_and_costs_no_delta() -> None:
    """Every learner's answers come at the very step that the arm names, no later for want of a moment."""
    quick, late = (train_islands(islands(2, 3 * 24 + 12, RATE, delay=delay, judged_on=()), 0) for delay in (2.0, 12.0))
    assert (quick.figures["answer_steps"], late.figures["answer_steps"]) == (2, 12)
    assert late.figures["merged"] == quick.figures["merged"]


def test_a_delay_is_as_long_for_a_delta_of_many_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BulkTransport, "part_size_bytes", 2**12)
    codec = {"codec": "float32", "block": 256, "vector_codec": "float32", "compressor": "none"}
    policy = {"delta_encoding": codec, "update_encoding": codec}
    outcome = train_islands(islands(2, 60, RATE, policy=policy, judged_on=()), 0)  # or it raises
    assert outcome.figures["answer_steps"] == 2


def test_steps_that_died_with_their_process_are_taken_again_until_as_many_are_merged() -> None:
    arm = islands(2, 80, RATE, policy=H8, islands=(Island(deaths=2),) * 2, judged_on=())
    outcome = train_islands(arm, 0)
    assert min(outcome.step_counts) > 80
    assert 2 * 80 <= outcome.figures["merged_steps"] <= 2 * 80 + 4
    assert train_islands(arm, 1).step_counts != outcome.step_counts  # they die at other times


def test_work_counts_as_merged_after_the_log_has_forgotten_its_deltas(monkeypatch: pytest.MonkeyPatch) -> None:
    often = replace(world._SETTINGS, replica=replace(world._SETTINGS.replica, checkpoint_every=16))
    monkeypatch.setattr(world, "_SETTINGS", often)
    policy = {"inner_step_count": 2, "kept_version_count": 1, "kept_hours": 0.0}
    arm = islands(2, 80, RATE, policy=policy, islands=(Island(deaths=1), Island()), fragment_count=1)
    figures = train_islands(arm, 0).figures
    assert figures["merged"] * figures["steps_a_delta"] < 2 * 80 - 20  # which the log still knows
    assert 2 * 80 <= figures["merged_steps"] <= 2 * 80 + 4


def test_islands_that_are_stopped_by_the_clock_have_taken_steps_by_their_speed() -> None:
    arm = islands(2, 40, RATE, policy=H8, islands=(Island(), Island(speed=0.25)), is_wall_clock=True, judged_on=())
    fast, slow = train_islands(arm, 0).step_counts
    assert 30 <= fast <= 40  # joining takes some time units
    assert 7 <= slow <= 10
