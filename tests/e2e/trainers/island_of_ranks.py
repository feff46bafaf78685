"""One rank of an island: `python -m tests.e2e.trainers.island_of_ranks TRAINER TARGET FOLDER FAILING_RANK`.

Each rank leaves what it saw in FOLDER/rank-N.pt.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from examples.lightning_trainer import Rotation
from skerry import Learner, Policy
from skerry.integrations import lightning as for_lightning
from skerry.integrations import transformers as for_transformers

OPTIONS: dict[str, Any] = {
    "run": "ranks", "learner_id": "island", "create": True, "policy": Policy(inner_step_count=2, lease_term_s=1.0),
}  # fmt: skip
STEPS = 7


class _Spy:
    """Keeps the learner, and raises at the third step of the rank that is to fail."""

    def __init__(self, rank: int, failing_rank: int) -> None:
        self.learner: Learner | None = None
        self._is_failing = rank == failing_rank
        self._step_count = 0

    def stepped(self, learner: Learner | None) -> None:
        self.learner = learner
        self._step_count += 1
        if self._is_failing and self._step_count == 3:
            raise ZeroDivisionError("a bad batch")


def _keep(folder: Path, rank: int, spy: _Spy, model: torch.nn.Module) -> None:
    assert spy.learner is not None
    stats = spy.learner.stats
    counts = (stats.step_count, stats.token_count, stats.unsent_step_count, spy.learner.planned_step_count)
    weights = {name: getattr(one, "full_tensor", lambda one=one: one)() for name, one in model.named_parameters()}
    torch.save({"counts": counts, "weights": weights}, folder / f"rank-{rank}.pt")


def _transformers(target: str, folder: Path, failing_rank: int, **more: Any) -> None:
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    )
    spy = _Spy(rank, failing_rank)
    skerry = for_transformers.SkerryCallback(target=target, **OPTIONS)

    class _Told(TrainerCallback):  # type: ignore[misc]  # untyped
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            spy.stepped(skerry.learner)

    arguments = TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=2, gradient_accumulation_steps=2, use_cpu=True,
        logging_steps=2, dataloader_num_workers=1, disable_tqdm=True, save_strategy="no", ddp_backend="gloo", **more,
    )  # fmt: skip
    tokens = torch.arange(512).reshape(64, 8) % 16
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[skerry, _Told()])
    try:
        trainer.train()
    finally:
        skerry.leave()
    _keep(folder, rank, spy, trainer.model)
    trainer.save_model(str(folder / "merged"))


def _fsdp(target: str, folder: Path, failing_rank: int) -> None:
    wrapped = ["LlamaDecoderLayer"]
    config = {"version": 2, "state_dict_type": "FULL_STATE_DICT", "transformer_layer_cls_to_wrap": wrapped}
    _transformers(target, folder, failing_rank, fsdp="full_shard", fsdp_config=config)


class Sharded(Rotation):
    """A model of which each rank holds a part."""

    def configure_model(self) -> None:
        """Shards it."""
        fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])


def _lightning(
    target: str, folder: Path, failing_rank: int, model: type[Rotation] = Rotation, strategy: Any = "ddp"
) -> None:
    skerry = for_lightning.SkerryCallback(tokens_per_step=5, target=target, **OPTIONS)

    class _Told(lightning.Callback):  # type: ignore[misc]  # untyped
        spy: _Spy

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if not hasattr(self, "spy"):
                self.spy = _Spy(trainer.global_rank, failing_rank)
            self.spy.stepped(skerry.learner)

    told, module = _Told(), model()
    trainer = lightning.Trainer(
        max_steps=STEPS, accelerator="cpu", devices=2, strategy=strategy, callbacks=[skerry, told], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data: Any = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    trainer.fit(module, DataLoader(data, batch_size=4, num_workers=1))
    _keep(folder, trainer.global_rank, told.spy, module)
    trainer.save_checkpoint(folder / "merged")


def _model_parallel(target: str, folder: Path, failing_rank: int) -> None:
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=False)
    _lightning(target, folder, failing_rank, Sharded, strategy)


if __name__ == "__main__":
    kind, where, out, failing = sys.argv[1:]
    programs = {
        "transformers": _transformers,
        "fsdp": _fsdp,
        "lightning": _lightning,
        "model_parallel": _model_parallel,
    }
    programs[kind](where, Path(out), int(failing))
