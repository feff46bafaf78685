"""Batches: a pure function of seed, learner and step that goes through everything once an epoch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from skerry_learner.batches import BatchSampler, held_out_batches
from skerry_learner.errors import LearnerInputError
from skerry_learner.settings import MODEL_CONFIGS

_MODEL = replace(MODEL_CONFIGS["nano"], context=9, vocabulary=1000)
_TOKENS = np.arange(1000, dtype=np.uint16)


def _sampler(*, seed: int = 0, learner: str = "a", batch_size: int = 4, vocabulary: int = 1000) -> BatchSampler:
    model = replace(_MODEL, vocabulary=vocabulary)
    return BatchSampler(_TOKENS, model, batch_size=batch_size, seed=seed, learner=learner)


def test_targets_are_the_tokens_that_follow() -> None:
    batch = _sampler().batch(0)
    assert batch.tokens.shape == (4, 9)
    assert torch.equal(batch.targets, batch.tokens + 1)
    assert batch.token_count == 36


def test_the_same_step_gives_the_same_batch_whatever_was_asked_before() -> None:
    walked = _sampler()
    for step in range(60):
        walked.batch(step)
    assert torch.equal(walked.batch(7).tokens, _sampler().batch(7).tokens)


def test_seed_and_learner_each_change_the_order() -> None:
    first = _sampler().batch(0).tokens
    assert not torch.equal(first, _sampler(seed=1).batch(0).tokens)
    assert not torch.equal(first, _sampler(learner="b").batch(0).tokens)


def test_every_epoch_reads_every_window_once_in_another_order() -> None:
    sampler = _sampler(batch_size=1)
    starts = [int(sampler.batch(step).tokens[0, 0]) for step in range(198)]
    first, second = ([start // 10 for start in epoch] for epoch in (starts[:99], starts[99:]))
    assert len({start % 10 for start in starts[:99]}) == 1
    assert sorted(first) == sorted(second) == list(range(99))
    assert first != second


def test_held_out_windows_are_spread_over_the_whole_and_never_change() -> None:
    batches = held_out_batches(_TOKENS, _MODEL, batch_size=4, window_count=6)
    assert [len(batch.tokens) for batch in batches] == [4, 2]
    assert int(batches[0].tokens[0, 0]) == 0
    assert int(batches[-1].targets[-1, -1]) == 999


def test_too_little_data_says_what_would_help() -> None:
    with pytest.raises(LearnerInputError, match="Use more --data, fewer shards, or a smaller --batch"):
        _sampler(batch_size=100)
    with pytest.raises(LearnerInputError, match="too few held-out tokens"):
        held_out_batches(_TOKENS[:9], _MODEL, batch_size=4, window_count=6)


def test_a_token_outside_the_vocabulary_says_what_would_help() -> None:
    with pytest.raises(LearnerInputError, match="Raise --vocabulary"):
        _sampler(vocabulary=10).batch(0)
