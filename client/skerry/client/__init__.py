"""What a training loop imports to take part in a run, and scripts to look after one.

`Learner` wraps a torch module, `ArrayLearner` NumPy arrays, `RunsClient` administers runs. torch is imported only when
`Learner` is asked for.
"""

from __future__ import annotations

from skerry.client.errors import (
    AttachAgainError,
    CorruptDownloadError,
    PlanExpiredError,
    PoisonedError,
    RefusedError,
    RunClosedError,
    RunExistsError,
    RunNotFoundError,
    SkerryError,
    StopExchangingError,
    TryAgainError,
    WorkRefusedError,
)
from skerry.client.plan import FragmentPlan, plan_fragments
from skerry.client.runs import RunsClient
from skerry.wire.policy import MergeRule, OuterOptimizer, OuterSchedule, Policy

__all__ = [
    "AttachAgainError",
    "CorruptDownloadError",
    "FragmentPlan",
    "MergeRule",
    "OuterOptimizer",
    "OuterSchedule",
    "PlanExpiredError",
    "PoisonedError",
    "Policy",
    "RefusedError",
    "RunClosedError",
    "RunExistsError",
    "RunNotFoundError",
    "RunsClient",
    "SkerryError",
    "StopExchangingError",
    "TryAgainError",
    "WorkRefusedError",
    "plan_fragments",
]
