"""A learner's own checkpoint: what it takes to go on after a restart as if nothing had happened.

It is local and private. The run's state lives in the store; this keeps what the store doesn't have: the inner
optimizer's moments, the step, and the random state. A write is atomic and survives a power cut: a temporary file,
synced, renamed over the old one, and the directory synced, so that there is always one whole checkpoint or none.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch

from skerry.learner.errors import CheckpointError
from skerry.learner.inner_training import InnerOptimizer
from skerry.learner.model import Gpt, ModelConfig

_FORMAT: Final = 2


@dataclass(frozen=True)
class TrainingPosition:
    """How far one learner is: inner steps, tokens, and seconds of training over all attempts."""

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
    """Replace the checkpoint at `path` by the present state; durable when this returns.

    Raises:
        OSError: it could not be written; the checkpoint that was there still is.
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
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            _write(content, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_directory(path.parent)


def load_checkpoint(path: Path, *, model: Gpt, optimizer: InnerOptimizer) -> TrainingPosition | None:
    """Put what `path` holds into `model` and `optimizer` and give its position; None where there is no checkpoint.

    Torch's global generators are set too.

    Raises:
        CheckpointError: it can't be read, or belongs to a model of another shape.
    """
    if not path.exists():
        return None
    content = _read(path)
    config = ModelConfig(**content["config"])
    if config != model.config:
        message = (
            f"the checkpoint {path} belongs to another model: name another --work-dir, or give the options that it was "
            f"made with. checkpoint={config}, asked={model.config}"
        )
        raise CheckpointError(message)
    try:
        optimizer.load_state_dict(content["optimizer"])
    except ValueError as error:
        message = (
            f"the checkpoint {path} belongs to another optimizer: give the --optimizer that it was made with, or name "
            f"another --work-dir. {error}"
        )
        raise CheckpointError(message) from error
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
        # torch finds its archive incomplete after a write has failed, and says that instead of what failed.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _read(path: Path) -> dict[str, Any]:
    try:
        # Tensors and plain values only: a checkpoint from elsewhere can't run code here.
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        message = f"cannot read the checkpoint {path}: remove it to start anew, or name another --work-dir. {error}"
        raise CheckpointError(message) from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        message = f"{path} isn't a checkpoint of this version: remove it to start anew, or name another --work-dir"
        raise CheckpointError(message)
    return content


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
