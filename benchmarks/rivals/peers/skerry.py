"""Skerry: `skerry serve` with a durable store of files, and its array learner."""

from __future__ import annotations

from argparse import Namespace
from typing import Any, Final

from benchmarks.due_steps import DueSteps, H, steps_are_made_up
from benchmarks.processes import Served
from benchmarks.rivals.peers import model
from benchmarks.rivals.peers.dialogue import converse
from skerry import ArrayLearner, Policy

_TIMEOUT_S: Final = 120.0


class Learner:
    """A learner whose rounds wait for all."""

    def __init__(self, arguments: Namespace) -> None:
        self._arrays = model.arrays()
        steps_are_made_up()
        self._learner = ArrayLearner(
            self._arrays,
            target=arguments.target,
            run="rivals",
            learner_id=f"learner-{arguments.number}",
            create=True,
            policy=Policy(
                inner_step_count=H,
                quorum_count=arguments.learners,
                lease_term_s=60.0,
                kept_version_count=1,
                kept_hours=0.0,
                kept_day_count=0,
            ),
            connect_timeout_s=_TIMEOUT_S,
            tls="insecure",
        )
        self._steps = DueSteps(self._learner)

    def weights(self) -> list[Any]:
        """Returns the arrays."""
        return list(self._arrays.values())

    def prepare(self) -> None:
        """Takes all steps but the last few."""
        self._steps.approach()

    def synchronise(self) -> None:
        """Takes the steps that make a delta of each fragment due, and goes on until each has its next version."""
        self._steps.synchronise(_TIMEOUT_S)


def serve(arguments: Namespace) -> str:
    """Starts a syncer, and returns its address."""
    return Served(arguments.folder).target


if __name__ == "__main__":
    converse(serve, Learner)
