"""A delta's journey, from `Learner.step` to the adoption of what it contributed to, runs through few files."""

from __future__ import annotations

from typing import Final

import pytest

from tests.house.architecture import named_files
from tests.house.product import ROOT
from tests.house.walk import FILE_BOUND, walk

# Where every delta comes by.
_ROOMS: Final = (
    "client/skerry/client/",
    "core/skerry/algorithm/",
    "core/skerry/wire/",
    "services/skerry/store/log/",
    "services/skerry/store/versions/",
    "services/skerry/syncer/",
)


@pytest.fixture(scope="module")
def journey() -> dict[str, str]:
    """The files of a journey, in order, each with the function that ran first."""
    return walk()


def test_a_deltas_journey_runs_through_few_files(journey: dict[str, str]) -> None:
    table = "\n".join(f"{number:3} {name:55} {first}" for number, (name, first) in enumerate(journey.items(), 1))
    missing = [room for room in _ROOMS if not any(name.startswith(room) for name in journey)]
    assert not missing, f"the journey was not recorded whole. missing={missing}\n{table}"
    assert len(journey) <= FILE_BOUND, f"{len(journey)} files, at most {FILE_BOUND}:\n{table}"


def test_the_architecture_page_names_every_file_of_the_journey(journey: dict[str, str]) -> None:
    assert sorted(journey.keys() - set(named_files())) == [], "docs/architecture.md leaves these files out"


def test_every_file_that_the_architecture_page_names_exists() -> None:
    assert [name for name in named_files() if not (ROOT / name).exists()] == []
