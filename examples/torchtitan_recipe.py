"""torchtitan: call `train_with_skerry(trainer, ...)` in place of `trainer.train()` in a copy of torchtitan/train.py.

All ranks of the job are one learner; start it by torchrun as ever. Pipeline parallelism is refused. For example:

    train_with_skerry(trainer, tokens_per_step=64 * 8192, target="a.example:50051", run="titan", create=True)
"""

from typing import Any

import torch

from skerry import Learner


def train_with_skerry(trainer: Any, *, tokens_per_step: int, **options: Any) -> None:
    """Trains as `trainer.train()` does; `tokens_per_step` is global_batch_size times seq_len."""
    train_step, learner = trainer.train_step, None

    def train_and_exchange(batches: Any) -> None:
        nonlocal learner
        if learner is None:  # not before, since train() begins by loading the checkpoint
            (model,) = trainer.model_parts
            learner = Learner(model, **options)
        train_step(batches)
        learner.step(tokens_per_step if torch.distributed.get_rank() == 0 else 0)

    trainer.train_step = train_and_exchange
    trainer.train()
    if learner is not None:  # else the checkpoint was of the last step
        learner.leave(60.0, load_merged=True)
