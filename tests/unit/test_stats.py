"""The statistics of the processes of a learner, as those of one."""

from __future__ import annotations

import pickle
from dataclasses import replace

from skerry.errors import StopExchangingError
from skerry.stats import Stats, sum_of


def test_the_statistics_of_ranks_are_those_of_one_learner() -> None:
    problem = StopExchangingError("RUN_DELETED", "gone")
    first = Stats(step_count=7, unsent_step_count=1, bytes_up=10, causes={"EXPIRED": 1}, versions={"a": 3})
    second = Stats(step_count=7, unsent_step_count=4, bytes_up=5, causes={"EXPIRED": 2}, versions={"b": 1})
    assert sum_of([first, replace(second, problem=problem, waiting_s=6.0, is_closed=True)]) == Stats(
        step_count=7,
        unsent_step_count=4,
        problem=problem,
        bytes_up=15,
        causes={"EXPIRED": 3},
        versions={"a": 3, "b": 1},
        waiting_s=6.0,
        is_closed=True,
    )


def test_errors_travel_between_ranks() -> None:
    failure = StopExchangingError("RUN_DELETED", "gone")
    again = pickle.loads(pickle.dumps(failure))
    assert (type(again), again.reason, str(again)) == (StopExchangingError, "RUN_DELETED", "gone")
