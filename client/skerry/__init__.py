"""Trains one model on islands of compute: what a training loop imports to take part in a run.

`Learner` trains a torch module, `attach` has it follow an optimizer, `ArrayLearner` trains NumPy arrays, and
`RunsClient` administers runs. A name's module is imported at its first use, and torch only with `Learner` and `attach`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

import skerry.net.forks  # noqa: F401 - has to come before the first import of gRPC

if TYPE_CHECKING:
    from skerry.array_learner import ArrayLearner
    from skerry.errors import (
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
    from skerry.learner import Learner, attach
    from skerry.leaving import leave_on_signal
    from skerry.model.fragment_plan import FragmentPlan, plan_fragments
    from skerry.net.tls import Tls
    from skerry.runs.client import RunsClient
    from skerry.stats import LastWork, Stats
    from skerry.wire.policy import MergeRule, OuterName, OuterOptimizer, OuterSchedule, Policy

__all__ = [
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

_HOMES: Final = {
    "skerry.array_learner": ("ArrayLearner",),
    "skerry.errors": tuple(name for name in __all__ if name.endswith("Error")),
    "skerry.learner": ("Learner", "attach"),
    "skerry.leaving": ("leave_on_signal",),
    "skerry.model.fragment_plan": ("FragmentPlan", "plan_fragments"),
    "skerry.net.tls": ("Tls",),
    "skerry.runs.client": ("RunsClient",),
    "skerry.stats": ("LastWork", "Stats"),
    "skerry.wire.policy": ("MergeRule", "OuterName", "OuterOptimizer", "OuterSchedule", "Policy"),
}


if not TYPE_CHECKING:  # a type checker would take any name for one of the package

    def __getattr__(name: str) -> Any:
        """Imports the module of a name at its first use."""
        for module, names in _HOMES.items():
            if name in names:
                return getattr(importlib.import_module(module), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
