"""A learner's own checkpoint, which a restarted learner resumes from.

The run's weights are in the store; the checkpoint has what the store does not: the inner optimizer's moments and the
step. Batches are a function of the step, and nothing else in training is random.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from skerry.runtime.files import replacing
from skerry_learner.errors import LearnerInputError
from skerry_learner.inner_training import InnerOptimizer
from skerry_learner.model import Gpt


@dataclass(frozen=True)
class TrainingPosition:
    """Inner steps, tokens and seconds of training of one learner, over all its processes."""

    step: int = 0
    tokens: int = 0
    time_s: float = 0.0
    learner: str = ""  # the id of the first process, which the order of batches goes on from


def save_checkpoint(path: Path, *, model: Gpt, optimizer: InnerOptimizer, position: TrainingPosition) -> None:
    """Replaces the checkpoint at `path` by the current state, at once.

    Raises:
        OSError, RuntimeError: it could not be written; the old checkpoint is unchanged.
    """
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "position": asdict(position)}
    with replacing(path) as file:
        torch.save(content, file)


def load_checkpoint(path: Path, *, model: Gpt, optimizer: InnerOptimizer) -> TrainingPosition:
    """Loads the checkpoint at `path` into `model` and `optimizer`; returns its position, the start if there is none.

    Raises:
        LearnerInputError: it can't be read, or belongs to another model or optimizer.
    """
    if not path.exists():
        return TrainingPosition()
    try:
        # Tensors and plain values only, so that a file from elsewhere cannot run code.
        content = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
        return TrainingPosition(**content["position"])
    except Exception as error:
        because = type(error).__name__  # torch's own text has many lines, and advice that does not help here
        raise LearnerInputError(
            f"the checkpoint is damaged, or of another --model or --optimizer. path={path}, because={because}. "
            "Remove it, or use another --work-dir"
        ) from error
