"""A delta's journey, from `Learner.step` to the adoption of what it contributed to, runs through few files."""

from __future__ import annotations

from typing import Final

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


def test_a_deltas_journey_runs_through_few_files() -> None:
    files = walk()
    table = "\n".join(f"{number:3} {name:55} {first}" for number, (name, first) in enumerate(files.items(), 1))
    assert len(files) <= FILE_BOUND, f"{len(files)} files, at most {FILE_BOUND}:\n{table}"
    missing = [room for room in _ROOMS if not any(name.startswith(room) for name in files)]
    assert not missing, f"the journey was not recorded whole. missing={missing}\n{table}"
