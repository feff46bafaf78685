"""What a training loop gives, checked before anything is done with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from skerry.exchange.settings import whole_number
from skerry.learner import token_counter

MASK = torch.tensor([True, False, True])


@pytest.mark.parametrize(
    "given", [2, 2.0, np.int32(2), np.float32(2), MASK.sum(), MASK.float().sum(), MASK.sum()[None]]
)
def test_a_whole_number_is_taken_whatever_holds_it(given: Any) -> None:
    assert (whole_number(given, "tokens"), type(whole_number(given, "tokens"))) == (2, int)
    assert token_counter(given)() == 2


@pytest.mark.parametrize(
    "given", [1.5, MASK.float().mean(), np.mean([1, 2]), float("nan"), float("inf"), "2", None, MASK.any(), True, 2**70]
)
def test_what_is_no_whole_number_is_refused_by_name(given: Any) -> None:
    with pytest.raises(ValueError, match="tokens must be a whole number"):
        whole_number(given, "tokens")


def test_tokens_may_be_a_function_and_are_at_least_1() -> None:
    counts = iter([5, 7])
    count = token_counter(lambda: next(counts))
    assert [count(), count()] == [5, 7]
    with pytest.raises(ValueError, match="tokens_per_step must be at least 1"):
        token_counter(0)
