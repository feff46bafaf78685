"""The reference model's shapes, and what a prediction depends on."""

from __future__ import annotations

from dataclasses import replace

import torch

from skerry_learner.model import Gpt
from skerry_learner.settings import ModelConfig

_SMALL = ModelConfig(layer_count=2, width=32, head_count=2, context=16)


def test_the_output_has_the_vocabulary_of_the_embedding() -> None:
    assert Gpt(replace(_SMALL, vocabulary=300))(torch.zeros(3, 7, dtype=torch.int64)).shape == (3, 7, 300)


def test_a_token_is_predicted_from_those_before_it_alone() -> None:
    torch.manual_seed(0)
    model = Gpt(_SMALL)
    tokens = torch.randint(0, 256, (1, 16))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    with torch.inference_mode():
        before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])
