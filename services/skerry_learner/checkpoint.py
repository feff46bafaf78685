"""A learner's own checkpoint, which a restarted learner resumes from.

The run's weights are in the store; the checkpoint has what the store does not: the inner optimizer's moments, the step
and the random state. A write is atomic and survives a power cut: the content goes to a temporary file that is synced
and renamed over the old checkpoint, and the directory is synced.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch

from skerry.runtime.files import replacing
from skerry_learner.errors import LearnerInputError
from skerry_learner.inner_training import InnerOptimizer
from skerry_learner.model import Gpt, ModelConfig

_FORMAT: Final = 2


@dataclass(frozen=True)
class TrainingPosition:
    """Inner steps, tokens and seconds of training of one learner, over all attempts."""

    step: int = 0
    tokens: int = 0
    time_s: float = 0.0


def save_checkpoint(
    path: Path,
    *,
    model: Gpt,
    optimizer: InnerOptimizer,
    position: TrainingPosition,
) -> None:
    """Replace the checkpoint at `path` by the current state; it is durable when this returns.

    Raises:
        OSError: it could not be written; the old checkpoint is unchanged.
    """
    content = {
        "format": _FORMAT,
        "config": asdict(model.config),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "position": asdict(position),
        "random_state": torch.get_rng_state(),
        "cuda_random_state": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        _write(content, file)
    _sync_directory(path.parent)


def load_checkpoint(path: Path, *, model: Gpt, optimizer: InnerOptimizer) -> TrainingPosition | None:
    """Load the checkpoint at `path` into `model`, `optimizer` and torch's global generators.

    Returns its position, or None if there is no checkpoint.

    Raises:
        LearnerInputError: it cannot be read, or belongs to another model or optimizer.
    """
    if not path.exists():
        return None
    content = _read(path)
    config = ModelConfig(**content["config"])
    if config != model.config:
        raise LearnerInputError(
            f"the checkpoint belongs to another model. path={path}, checkpoint={config}, requested={model.config}. "
            f"use another --work-dir, or the options that the checkpoint was made with"
        )
    try:
        optimizer.load_state_dict(content["optimizer"])
    except ValueError as error:
        raise LearnerInputError(
            f"the checkpoint belongs to another optimizer. path={path}, cause={error}. "
            f"use another --work-dir, or the --optimizer that the checkpoint was made with"
        ) from error
    model.load_state_dict(content["model"])
    torch.set_rng_state(content["random_state"])
    cuda_random_state = content["cuda_random_state"]
    if torch.cuda.is_available() and len(cuda_random_state) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(cuda_random_state)
    return TrainingPosition(**content["position"])


def _write(content: dict[str, Any], file: BinaryIO) -> None:
    try:
        torch.save(content, file)
    except RuntimeError as error:
        # After a failed write torch reports an incomplete archive; the cause is the error before it.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _read(path: Path) -> dict[str, Any]:
    try:
        # Tensors and plain values only, so that a file from elsewhere cannot run code.
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        cause = type(error).__name__  # torch's own advice would not help here
        raise LearnerInputError(
            f"cannot read the checkpoint. path={path}, cause={cause}. remove it, or use another --work-dir"
        ) from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise LearnerInputError(f"not a checkpoint of this version. path={path}. remove it, or use another --work-dir")
    return content


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
