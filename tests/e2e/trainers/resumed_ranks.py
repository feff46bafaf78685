"""One of two ranks of an island that dies after its third step, or at once after it has resumed.

`python -m tests.e2e.trainers.resumed_ranks TRAINER TARGET FOLDER LIFE`: life 0 begins and dies after its third step;
life 1 resumes from the checkpoint of the second step and dies. Each rank leaves what it saw in FOLDER/rank-N-LIFE.pt.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from examples.lightning_trainer import Rotation
from skerry.integrations import lightning as for_lightning
from skerry.integrations import transformers as for_transformers
from tests.e2e.trainers.island_of_ranks import Sharded

OPTIONS: dict[str, Any] = {"run": "ranks", "learner_id": "island", "create": True}


class _Seen:
    """The counts and weights before each step."""

    def __init__(self, folder: Path, life: int) -> None:
        self.folder = folder
        self.life = life
        self.learner: Any = None
        self.counts: list[tuple[int, int]] = []
        self.weights: list[list[torch.Tensor]] = []

    def stepping(self, learner: Any, model: torch.nn.Module) -> None:
        """Takes note of a step that is about to begin; raises where the process is to die."""
        self.learner = learner
        self._look(model)
        if self.life == 1 or len(self.counts) > 3:
            self._keep()
            torch.distributed.barrier()
            os.kill(os.getpid(), signal.SIGKILL)

    def _look(self, model: torch.nn.Module) -> None:
        self.counts.append((self.learner.stats.step_count, self.learner.stats.unsent_step_count))
        whole = [getattr(one, "full_tensor", lambda one=one: one)() for one in model.parameters()]
        self.weights.append([one.detach().clone() for one in whole])

    def _keep(self) -> None:
        rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
        seen = {"counts": self.counts, "weights": self.weights}
        torch.save(seen, self.folder / f"rank-{rank}-{self.life}.pt")


class _ForTransformers(TrainerCallback):  # type: ignore[misc]  # untyped
    def __init__(self, skerry: for_transformers.SkerryCallback, seen: _Seen) -> None:
        self._skerry, self._seen = skerry, seen

    def on_step_begin(self, *_: Any, **kwargs: Any) -> None:
        self._seen.stepping(self._skerry.learner, kwargs["model"])


def _transformers(target: str, seen: _Seen, **more: Any) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    )
    skerry = for_transformers.SkerryCallback(target=target, **OPTIONS)
    arguments = TrainingArguments(
        str(seen.folder), max_steps=100, per_device_train_batch_size=2, use_cpu=True, learning_rate=0.1,
        dataloader_num_workers=1, disable_tqdm=True, save_strategy="steps", save_steps=2, ddp_backend="gloo",
        report_to=[], **more,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in torch.arange(512).reshape(64, 8) % 16]
    callbacks = [skerry, _ForTransformers(skerry, seen)]
    Trainer(model, arguments, train_dataset=rows, callbacks=callbacks).train(resume_from_checkpoint=seen.life > 0)


def _fsdp(target: str, seen: _Seen) -> None:
    wrapped = ["LlamaDecoderLayer"]
    config = {"version": 2, "state_dict_type": "FULL_STATE_DICT", "transformer_layer_cls_to_wrap": wrapped}
    _transformers(target, seen, fsdp="full_shard", fsdp_config=config)


class _ForLightning(lightning.Callback):  # type: ignore[misc]  # untyped
    def __init__(self, skerry: for_lightning.SkerryCallback, seen: _Seen) -> None:
        self._skerry, self._seen = skerry, seen

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self._seen.folder / "last.ckpt")
        self._seen.stepping(self._skerry.learner, module)


def _lightning(target: str, seen: _Seen, model: type[Rotation] = Rotation, strategy: Any = "ddp") -> None:
    skerry = for_lightning.SkerryCallback(tokens_per_step=5, target=target, **OPTIONS)
    trainer = lightning.Trainer(
        max_steps=6, accelerator="cpu", devices=2, strategy=strategy,
        callbacks=[skerry, _ForLightning(skerry, seen)], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data: Any = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    path = seen.folder / "last.ckpt" if seen.life > 0 else None
    trainer.fit(model(), DataLoader(data, batch_size=4, num_workers=1, persistent_workers=True), ckpt_path=path)


def _model_parallel(target: str, seen: _Seen) -> None:
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    _lightning(target, seen, Sharded, strategy)


if __name__ == "__main__":
    kind, where, out, life = sys.argv[1:]
    programs = {
        "transformers": _transformers,
        "fsdp": _fsdp,
        "lightning": _lightning,
        "model_parallel": _model_parallel,
    }
    programs[kind](where, _Seen(Path(out), int(life)))
