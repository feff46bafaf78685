"""Trains one model on islands of compute: what a training loop imports to take part in a run.

`Learner` trains a torch module, `attach` has it follow an optimizer, `ArrayLearner` trains NumPy arrays, `Follower`
yields the merged weights, and `RunsClient` administers runs. A name's module is imported at its first use, and torch
only with `Learner` and `attach`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

import skerry.net.forks  # noqa: F401 - has to come before the first import of gRPC

if TYPE_CHECKING:  # what type checkers and editors see
    from skerry.array_learner import ArrayLearner as ArrayLearner
    from skerry.errors import CorruptDownloadError as CorruptDownloadError
    from skerry.errors import PlanExpiredError as PlanExpiredError
    from skerry.errors import PoisonedError as PoisonedError
    from skerry.errors import RefusedError as RefusedError
    from skerry.errors import RunClosedError as RunClosedError
    from skerry.errors import RunExistsError as RunExistsError
    from skerry.errors import RunNotFoundError as RunNotFoundError
    from skerry.errors import SkerryError as SkerryError
    from skerry.errors import StopExchangingError as StopExchangingError
    from skerry.errors import StoreLostError as StoreLostError
    from skerry.errors import TryAgainError as TryAgainError
    from skerry.errors import WorkRefusedError as WorkRefusedError
    from skerry.follower import Follower as Follower
    from skerry.learner import Learner as Learner
    from skerry.learner import attach as attach
    from skerry.leaving import leave_on_signal as leave_on_signal
    from skerry.model.fragment_plan import FragmentPlan as FragmentPlan
    from skerry.model.fragment_plan import plan_fragments as plan_fragments
    from skerry.net.tls import Tls as Tls
    from skerry.runs.client import RunsClient as RunsClient
    from skerry.stats import LastWork as LastWork
    from skerry.stats import Stats as Stats
    from skerry.wire.policy import MergeRule as MergeRule
    from skerry.wire.policy import OuterName as OuterName
    from skerry.wire.policy import OuterOptimizer as OuterOptimizer
    from skerry.wire.policy import OuterSchedule as OuterSchedule
    from skerry.wire.policy import Policy as Policy

_HOMES: Final = {
    "skerry.array_learner": "ArrayLearner",
    "skerry.errors": "CorruptDownloadError PlanExpiredError PoisonedError RefusedError RunClosedError "
    "RunExistsError RunNotFoundError SkerryError StopExchangingError StoreLostError TryAgainError WorkRefusedError",
    "skerry.follower": "Follower",
    "skerry.learner": "Learner attach",
    "skerry.leaving": "leave_on_signal",
    "skerry.model.fragment_plan": "FragmentPlan plan_fragments",
    "skerry.net.tls": "Tls",
    "skerry.runs.client": "RunsClient",
    "skerry.stats": "LastWork Stats",
    "skerry.wire.policy": "MergeRule OuterName OuterOptimizer OuterSchedule Policy",
}
__all__ = [name for names in _HOMES.values() for name in names.split()]


if not TYPE_CHECKING:  # a type checker would take any name for one of the package

    def __getattr__(name: str) -> Any:
        """Imports the module of a name at its first use."""
        for module, names in _HOMES.items():
            if name in names.split():
                return getattr(importlib.import_module(module), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
