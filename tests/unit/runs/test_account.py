"""What was contributed to a run, summed from events that are written by hand."""

from __future__ import annotations

import pytest

from skerry.runs.account import Account, Accounting, Contribution
from skerry.v1 import types_pb2 as v1


def attached(learner: str, organisation: str = "") -> v1.Event:
    status = v1.LearnerStatus(learner_id=learner, is_live=True, organisation=organisation)
    return v1.Event(position=2, learner=status)


def committed(version: int, shares: dict[str, float], *, fragment: str = "body") -> v1.Event:
    """Returns the event of a version that has a delta of ten steps of each learner, whose share is the weight."""
    merged = [
        v1.DeltaFate(learner_id=name, weight_share=share, step_count=10, token_count=1000)
        for name, share in shares.items()
    ]
    made = v1.VersionCommitted(version=v1.FragmentVersion(fragment=fragment, version=version), merged=merged)
    return v1.Event(position=9, version_committed=made)


def rolled_back(version: int, source: int) -> v1.Event:
    versions = [v1.FragmentVersion(fragment="body", version=version)]
    return v1.Event(position=9, rolled_back=v1.RolledBack(versions=versions, source_versions=[source]))


def summed(*events: v1.Event, fragment_count: int = 1) -> Account:
    accounting = Accounting()
    for event in events:
        accounting.apply(event)
    return accounting.account(fragment_count)


def test_tokens_and_steps_are_the_mean_over_fragments_and_shares_that_over_versions() -> None:
    account = summed(
        attached("us", "Lab A"),
        attached("eu", "Lab A"),
        attached("ap"),
        committed(0, {"creator": 1.0}),
        committed(1, {"us": 0.5, "eu": 0.25, "ap": 0.25}),
        committed(1, {"us": 1.0}, fragment="head"),
        v1.Event(position=12),
        fragment_count=2,
    )
    assert account == Account(
        position=12,
        version_count=2,
        learners=(
            Contribution(("us",), "Lab A", 1000, 10, 0.75, 2),
            Contribution(("ap",), "", 500, 5, 0.125, 1),
            Contribution(("eu",), "Lab A", 500, 5, 0.125, 1),
        ),
        organisations=(
            Contribution(("eu", "us"), "Lab A", 1500, 15, 0.875, 2),
            Contribution(("ap",), "", 500, 5, 0.125, 1),
        ),
    )


@pytest.mark.parametrize(
    ("sources", "learners"),
    [
        pytest.param((), ["a", "b", "c"], id="all of them"),
        pytest.param((1,), ["a"], id="one roll-back"),
        pytest.param((1, 3), ["a", "b", "c"], id="a roll-back that is taken back"),
        pytest.param((0,), [], id="to the beginning"),
    ],
)
def test_only_versions_that_the_newest_weights_come_from_count(sources: tuple[int, ...], learners: list[str]) -> None:
    rounds = [committed(version, {name: 1.0}) for version, name in enumerate("abc", 1)]
    backs = [rolled_back(number, source) for number, source in enumerate(sources, 4)]
    account = summed(*rounds, *backs)
    assert sorted(name for row in account.learners for name in row.learner_ids) == learners
    assert account.version_count == len(learners)


def test_a_learner_that_changes_its_organisation_is_in_both() -> None:
    account = summed(attached("us", "A"), committed(1, {"us": 1.0}), attached("us", "B"), committed(2, {"us": 1.0}))
    assert [(row.organisation, row.weight_share) for row in account.learners] == [("A", 0.5), ("B", 0.5)]


def test_a_run_without_versions_has_an_empty_account() -> None:
    assert summed(v1.Event(position=3)) == Account(3, 0, (), ())
