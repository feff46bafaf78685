"""The client: what a training loop imports to take part in a run, and a script to administer runs.

`Learner` trains a torch module, `ArrayLearner` NumPy arrays, and `RunsClient` administers runs. torch is imported only
when `Learner` is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skerry.client.array_learner import ArrayLearner
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
    StoreLostError,
    TryAgainError,
    WorkRefusedError,
)
from skerry.client.fragment_plan import FragmentPlan, plan_fragments
from skerry.client.leaving import leave_on_signal
from skerry.client.runs import RunsClient
from skerry.client.session import Adoption, Stats
from skerry.runtime.retry import RetrySettings
from skerry.runtime.tls import Tls
from skerry.wire.policy import MergeRule, OuterName, OuterOptimizer, OuterSchedule, Policy

if TYPE_CHECKING:
    from skerry.client.learner import Learner

__all__ = [
    "Adoption",
    "ArrayLearner",
    "AttachAgainError",
    "CorruptDownloadError",
    "FragmentPlan",
    "Learner",
    "MergeRule",
    "OuterName",
    "OuterOptimizer",
    "OuterSchedule",
    "PlanExpiredError",
    "PoisonedError",
    "Policy",
    "RefusedError",
    "RetrySettings",
    "RunClosedError",
    "RunExistsError",
    "RunNotFoundError",
    "RunsClient",
    "SkerryError",
    "Stats",
    "StopExchangingError",
    "StoreLostError",
    "Tls",
    "TryAgainError",
    "WorkRefusedError",
    "leave_on_signal",
    "plan_fragments",
]


def __getattr__(name: str) -> Any:
    """Imports `Learner`, and torch with it, at its first use."""
    if name == "Learner":
        from skerry.client.learner import Learner

        return Learner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
