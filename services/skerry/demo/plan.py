"""What shall happen in the demo, decided before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

_STEP_COUNT: Final = 1000
"""Inner steps of the fast islands where the machine has the time for them."""

_FEWEST_STEPS: Final = 240
"""Fifteen contributions a fragment: fewer show nothing, so a very slow machine takes longer than its budget instead."""

_FIXED_COST_S: Final = 45.0
"""Starting seven processes, judging some seventeen checkpoints, replaying the log and drawing, on two cores."""

_ISLAND_SHARE: Final = 2.0
"""Time of an inner step while three islands and a syncer share two cores, in steps of one undisturbed learner."""


@dataclass(frozen=True)
class IslandPlan:
    """One learner of the demo."""

    learner_id: str
    region: str
    shard: str
    slowdown: float = 1.0


@dataclass(frozen=True)
class TrainingPlan:
    """What the islands and the single learner have in common, so that the comparison is of like with like."""

    model: str = "tiny"
    batch_size: int = 8
    learning_rate: float = 3e-3
    warmup_steps: int = 50
    evaluate_every: int = 40
    evaluation_window_count: int = 128
    inner_step_count: int = 16
    lease_term_s: float = 5.0  # some fifty steps: a killed island is missed within a twentieth of the demo
    seed: int = 0


@dataclass(frozen=True)
class DemoPlan:
    """The whole demo; steps are inner steps of the first island, whose progress times everything."""

    directory: Path
    step_count: int
    training: TrainingPlan = TrainingPlan()
    run: str = "demo"
    islands: tuple[IslandPlan, ...] = (
        IslandPlan("us-east", "us", "1/3"),
        IslandPlan("eu-west", "eu", "2/3"),
        IslandPlan("ap-south", "ap", "3/3", slowdown=3.0),
    )
    killed_learner_id: str = "eu-west"

    @property
    def timekeeper(self) -> IslandPlan:
        """The island whose steps time the demo; it is fast and is never killed."""
        return self.islands[0]

    @property
    def learner_killed_at_step(self) -> int:
        """A third of the way."""
        return self.step_count // 3

    @property
    def learner_back_at_step(self) -> int:
        """Half of the way: it misses a sixth of the run."""
        return self.step_count // 2

    @property
    def syncer_killed_at_step(self) -> int:
        """Two thirds of the way."""
        return self.step_count * 2 // 3

    @property
    def syncer_back_at_step(self) -> int:
        """After H steps more, so that every fragment misses a contribution; starting takes it some seconds besides."""
        return self.syncer_killed_at_step + self.training.inner_step_count

    @property
    def store_url(self) -> str:
        """The embedded store, fresh for every demo."""
        return f"file://{(self.directory / 'store').absolute()}"


def affordable_steps(step_time_s: float, budget_s: float) -> int:
    """Inner steps that fit into `budget_s`, given the time of one on this machine when nothing else runs.

    Each is taken twice: once by the single learner, once by the islands, who share the machine.
    """
    affordable = int((budget_s - _FIXED_COST_S) / (step_time_s * (1.0 + _ISLAND_SHARE)))
    return max(_FEWEST_STEPS, min(_STEP_COUNT, affordable))
