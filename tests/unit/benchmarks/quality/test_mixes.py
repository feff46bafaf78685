"""Random mixes: what is drawn, and what each is held against."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.quality.arms import DataParallel, Islands
from benchmarks.quality.mixes import draw, parts, size_of, together
from benchmarks.quality.task import BYTES

SIZE = size_of(BYTES, "")


def test_a_mix_follows_from_its_number_and_stays_within_what_the_benchmark_promises() -> None:
    mixes = [draw(number, SIZE) for number in range(40)]
    assert mixes == [draw(number, SIZE) for number in range(40)]
    assert {len(mix.islands) for mix in mixes} == set(range(3, 9))
    for mix in mixes:
        assert all(1 / 8 <= island.speed <= 1 and 2 <= island.batch_size <= 32 for island in mix.islands)
        assert all(island.speed * (1 + island.extra_delay) <= 12 for island in mix.islands)
        assert not mix.islands[0].absent  # it creates the run
        assert sum(bool(island.absent) for island in mix.islands) <= 4


def test_the_parts_of_a_mix_are_its_learners_and_groups_of_up_to_four_on_the_data_that_they_have_in_it() -> None:
    mix = next(mix for mix in (draw(number, SIZE) for number in range(40)) if len(mix.islands) == 5)
    with_groups = parts(mix, SIZE, with_groups=True)
    assert len(with_groups) == 5 + 10 + 10 + 5
    pair = with_groups[1, 3]
    assert isinstance(pair, Islands)
    assert pair.islands == (replace(mix.islands[1], part=2), replace(mix.islands[3], part=4))
    assert pair.shard_count == 5
    lone = with_groups[3,]
    assert isinstance(lone, DataParallel)
    assert (lone.learner_count, lone.part, lone.shard_count) == (1, 4, 5)
    assert lone.step_count <= mix.islands[3].speed * SIZE.step_count + 1
    assert len(together(mix, SIZE).islands) == 5
