"""The client: what a training loop imports to take part in a run, and a script to administer runs.

`Learner` trains a torch module, `attach` has it follow an optimizer, `ArrayLearner` trains NumPy arrays, and
`RunsClient` administers runs. torch is imported only when `Learner` or `attach` is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import skerry.client.forks  # noqa: F401 - has to come before the first import of gRPC

# isort: split
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
from skerry.client.session import Adoption, LastWork, Stats
from skerry.runtime.retry import RetrySettings
from skerry.runtime.tls import Tls
from skerry.wire.policy import MergeRule, OuterName, OuterOptimizer, OuterSchedule, Policy

if TYPE_CHECKING:
    from skerry.client.learner import Learner, attach

__all__ = [
    "Adoption",
    "ArrayLearner",
    "AttachAgainError",
    "CorruptDownloadError",
    "FragmentPlan",
    "LastWork",
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
    "attach",
    "leave_on_signal",
    "plan_fragments",
]


def __getattr__(name: str) -> Any:
    """Imports `Learner` and `attach`, and torch with them, at their first use."""
    if name in {"Learner", "attach"}:
        from skerry.client import learner

        return getattr(learner, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
