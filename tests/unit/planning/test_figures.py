"""The figures that the planner is installed with are those of the speed benchmark's committed rows."""

from __future__ import annotations

from typing import Final

import pytest

from benchmarks.speed.table import COMMITTED, planned, read
from skerry.planning.figures import measured
from skerry.wire.codecs import Codec

MEGABYTE: Final = 1e6


def test_the_installed_figures_are_the_committed_rows_of_the_speed_benchmark() -> None:
    assert {str(codec): measured(codec) for codec in Codec} == planned(read(COMMITTED))


@pytest.mark.parametrize(("codec", "bits"), [(Codec.INT4, 4), (Codec.INT8, 8), (Codec.FLOAT32, 32)])
def test_every_codec_has_figures(codec: Codec, bits: int) -> None:
    figures = measured(codec)
    assert 0.8 * bits < figures.bits < 1.001 * bits
    assert 5e-9 < figures.learner_cpu_s < 1e-7
    assert 5e-9 < figures.syncer_cpu_s < 1e-7
    assert 2 < figures.learner_memory < 3


def test_a_syncer_has_the_memory_that_was_measured_and_between_sizes_what_is_between() -> None:
    figures = measured(Codec.INT4)
    (small, small_bytes), (large, large_bytes) = figures.syncer_bytes[1:3]
    assert figures.syncer_memory_bytes(small, 2) == pytest.approx(small_bytes)
    assert figures.syncer_memory_bytes((small + large) / 2, 2) == pytest.approx((small_bytes + large_bytes) / 2)
    assert figures.syncer_memory_bytes(10 * figures.syncer_bytes[-1][0], 2) > 4 * 10 * figures.syncer_bytes[-1][0]


def test_more_learners_take_more_memory_of_a_syncer_as_measured_with_64() -> None:
    figures = measured(Codec.INT4)
    (row,) = (row for row in read(COMMITTED)["memory"] if row.case.startswith("64 learners"))
    assert figures.syncer_memory_bytes(40 * MEGABYTE, 64) == pytest.approx(row.value * MEGABYTE)
