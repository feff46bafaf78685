"""What is to happen in the demo, decided before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

_MAX_STEP_COUNT: Final = 1000
"""Inner steps of the fast learners on a machine that is fast enough."""

_MIN_STEP_COUNT: Final = 400
"""In 240 steps the merged model is no better than a single learner's (2.061 and 2.059), in 400 it is (1.895 and 1.930).
A slow machine exceeds its budget instead."""

_FIXED_COST_S: Final = 45.0
"""Time on two cores for starting seven processes, evaluating 17 exports, replaying the log and drawing."""

_SHARED_STEP_COST: Final = 2.0
"""Duration of a step while three learners and a syncer share two cores, in steps of one learner by itself."""


@dataclass(frozen=True)
class LearnerPlan:
    """One learner of the demo."""

    learner_id: str
    region: str
    shard: str
    slowdown: float = 1.0


@dataclass(frozen=True)
class TrainingPlan:
    """Settings that the three learners share with the single-learner baseline, so that the two can be compared."""

    model: str = "tiny"
    batch_size: int = 8
    learning_rate: float = 3e-3
    warmup_steps: int = 50
    evaluate_every: int = 40
    evaluation_window_count: int = 128
    inner_step_count: int = 16
    lease_term_s: float = 5.0  # some fifty steps, so a killed learner is noticed within a twentieth of the demo
    seed: int = 0


@dataclass(frozen=True)
class DemoPlan:
    """The whole demo. Steps are inner steps of the first learner."""

    directory: Path
    step_count: int
    training: TrainingPlan = TrainingPlan()
    run: str = "demo"
    learners: tuple[LearnerPlan, ...] = (
        LearnerPlan("us-east", "us", "1/3"),
        LearnerPlan("eu-west", "eu", "2/3"),
        LearnerPlan("ap-south", "ap", "3/3", slowdown=3.0),
    )
    baseline: LearnerPlan = LearnerPlan("single", "", "1/1")  # reads all of the data, so its shard is no handicap
    killed_learner_id: str = "eu-west"

    @property
    def timekeeper(self) -> LearnerPlan:
        """The learner whose steps decide when things happen. It is fast and is never killed."""
        return self.learners[0]

    @property
    def learner_killed_at_step(self) -> int:
        """After a third of the steps."""
        return self.step_count // 3

    @property
    def learner_back_at_step(self) -> int:
        """After half of the steps, so the learner misses a sixth of the run."""
        return self.step_count // 2

    @property
    def syncer_killed_at_step(self) -> int:
        """After two thirds of the steps."""
        return self.step_count * 2 // 3

    @property
    def syncer_back_at_step(self) -> int:
        """H steps later, so every fragment misses a contribution. The restart takes a few seconds more."""
        return self.syncer_killed_at_step + self.training.inner_step_count

    @property
    def store_url(self) -> str:
        """The local store, made anew by every demo."""
        return f"file://{(self.directory / 'store').absolute()}"


def affordable_steps(step_time_s: float, budget_s: float) -> int:
    """Inner steps that fit into `budget_s`, if one takes `step_time_s` on this machine while nothing else runs.

    Every step is taken twice: by the baseline, and then by the learners, which share the machine.
    """
    affordable = int((budget_s - _FIXED_COST_S) / (step_time_s * (1.0 + _SHARED_STEP_COST)))
    return max(_MIN_STEP_COUNT, min(_MAX_STEP_COUNT, affordable))
