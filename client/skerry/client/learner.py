"""A learner of a torch module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from skerry.client.array_learner import ArrayLearner
from skerry.client.torch_parameters import TorchParameters


class Learner(ArrayLearner):
    """An island that trains a torch module; everything else is as `ArrayLearner` says.

        with Learner(model, target="syncer.example:443", run="gemma-12b", learner_id="us-east") as island:
            for batch in loader:
                loss = model(**batch).loss
                loss.backward(); optimizer.step(); optimizer.zero_grad()
                island.step(tokens=batch["input_ids"].numel())      # returns at once

    `model` is a module, of which the trainable parameters take part (tied ones once; names without the prefixes of
    torch.compile and DistributedDataParallel), or tensors by name. Their storage must stay what it is: move the model
    to its device first.
    """

    def __init__(self, model: torch.nn.Module | Mapping[str, torch.Tensor], **options: Any) -> None:
        """Connects and attaches. `options` are those of `ArrayLearner`, by name."""
        super().__init__(TorchParameters(model), **options)
