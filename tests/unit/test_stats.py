"""The statistics of the processes of a learner, as those of one."""

from __future__ import annotations

import pickle

from skerry.errors import StopExchangingError
from skerry.stats import Stats, sum_of


def test_the_statistics_of_ranks_are_those_of_one_learner() -> None:
    problem = StopExchangingError("RUN_DELETED", "gone")
    first = Stats(
        step_count=7,
        token_count=70,
        unsent_step_count=1,
        is_attached=True,
        bytes_up=10,
        deltas_merged=1,
        causes={"EXPIRED": 1},
        versions={"a": 3},
        staleness=1.0,
        waiting_s=2.0,
        stall_s_max=0.5,
    )
    second = Stats(
        step_count=7,
        token_count=70,
        unsent_step_count=4,
        problem=problem,
        bytes_up=5,
        deltas_merged=3,
        causes={"EXPIRED": 2},
        versions={"b": 1},
        staleness=0.0,
        waiting_s=6.0,
        stall_s_max=0.25,
    )
    assert sum_of([first, second]) == Stats(
        step_count=7,
        token_count=70,
        unsent_step_count=4,
        problem=problem,
        is_attached=True,
        bytes_up=15,
        deltas_merged=4,
        causes={"EXPIRED": 3},
        versions={"a": 3, "b": 1},
        staleness=1.0,
        waiting_s=6.0,
        stall_s_max=0.5,
    )


def test_errors_travel_between_ranks() -> None:
    failure = StopExchangingError("RUN_DELETED", "gone")
    again = pickle.loads(pickle.dumps(failure))
    assert (type(again), again.reason, str(again)) == (StopExchangingError, "RUN_DELETED", "gone")
