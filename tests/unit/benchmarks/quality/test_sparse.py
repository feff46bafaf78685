"""Codings of deltas in fine-tuning, and their committed results."""

from __future__ import annotations

import numpy as np

from benchmarks.quality.sparse import COMMITTED, arms, pulse, read, top_k


def test_the_committed_results_are_those_of_all_arms() -> None:
    assert read(COMMITTED).keys() == set(arms())


def test_a_pulse_holds_what_changes_a_bfloat16_weight_and_nothing_else() -> None:
    anchor = np.array([1.0, 1.0, -2.0, 0.5], np.float32)
    delta = np.array([0.25, 1e-4, -1e-4, -0.125], np.float32)
    assert pulse(anchor, delta).decoded.tolist() == [0.25, 0.0, 0.0, -0.125]


def test_the_largest_of_each_chunk_keep_their_signs() -> None:
    delta = np.full(2 * 4096, 1e-3, np.float32)
    delta[:64], delta[-64:] = 1.0, -1.0
    decoded = top_k(np.zeros_like(delta), delta).decoded
    assert decoded[:64].min() > 0 > decoded[-64:].max()
    assert np.count_nonzero(decoded) == 128
