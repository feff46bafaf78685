"""One rank of an island: `python -m tests.e2e.trainers.island_of_ranks TRAINER TARGET FOLDER LIFE`.

LIFE is `whole`: the rank trains to the end; `failing`: the second rank raises an error in its third step; `killed`:
both ranks are killed after their third step; `resumed`: they begin from the checkpoint of the second step, and are
killed at once. Each rank leaves what it saw in FOLDER/LIFE-RANK.pt.
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
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from examples.lightning_trainer import Rotation
from skerry import Policy
from skerry.integrations import lightning as for_lightning
from skerry.integrations import transformers as for_transformers
from tests.e2e.trainers.hugging_face import llama

STEPS = 7


class _Life:
    """What happens to a rank, and what it has seen: counts and weights before each step."""

    def __init__(self, target: str, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self.is_long = name in {"whole", "failing"}
        # What ends early sends nothing.
        policy = {"policy": Policy(inner_step_count=2, lease_term_s=1.0)} if self.is_long else {}
        self.options: dict[str, Any] = {
            "target": target, "run": "ranks", "learner_id": "island", "create": True, **policy,
        }  # fmt: skip
        self._seen: list[tuple[tuple[int, ...], list[torch.Tensor]]] = []

    def step(self, learner: Any, model: torch.nn.Module) -> None:
        """Takes note of a step that is about to begin, or ends the rank."""
        self._learner = learner
        self._look(model)
        if self.name == "failing" and os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "1":
            if len(self._seen) == 3:
                raise ZeroDivisionError("a bad batch")
        elif self.name == "resumed" or (self.name == "killed" and len(self._seen) > 3):
            self._save()
            torch.distributed.barrier()
            os.kill(os.getpid(), signal.SIGKILL)

    def end(self, model: torch.nn.Module) -> None:
        """Takes note of the end."""
        self._look(model)
        self._save()

    def _look(self, model: torch.nn.Module) -> None:
        stats = self._learner.stats
        counts = stats.step_count, stats.token_count, stats.unsent_step_count
        whole = [getattr(one, "full_tensor", lambda one=one: one)() for one in model.parameters()]
        self._seen.append((counts, [one.detach().clone() for one in whole]))

    def _save(self) -> None:
        rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
        torch.save(self._seen, self.folder / f"{self.name}-{rank}.pt")


def _transformers(life: _Life, **more: Any) -> None:
    torch.manual_seed(int(os.environ["RANK"]))
    skerry = for_transformers.SkerryCallback(**life.options)

    class _Told(TrainerCallback):  # type: ignore[misc]  # untyped
        def on_step_begin(self, *_: Any, **kwargs: Any) -> None:
            life.step(skerry.learner, kwargs["model"])

    arguments = TrainingArguments(
        str(life.folder), max_steps=STEPS, per_device_train_batch_size=2, gradient_accumulation_steps=2, use_cpu=True,
        logging_steps=2, learning_rate=0.1, dataloader_num_workers=1, disable_tqdm=True, report_to=[],
        save_strategy="no" if life.is_long else "steps", save_steps=2, ddp_backend="gloo", **more,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in torch.arange(512).reshape(64, 8) % 16]
    trainer = Trainer(llama(), arguments, train_dataset=rows, callbacks=[skerry, _Told()])
    try:
        trainer.train(resume_from_checkpoint=life.name == "resumed")
    finally:
        skerry.leave()
    life.end(trainer.model)
    trainer.save_model(str(life.folder / "merged"))


class _Sharded(Rotation):
    """A model of which each rank holds a part."""

    def configure_model(self) -> None:
        """Shards it."""
        fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])


def _lightning(life: _Life, model: type[Rotation] = Rotation, strategy: Any = "ddp") -> None:
    skerry = for_lightning.SkerryCallback(tokens_per_step=5, **life.options)

    class _Told(lightning.Callback):  # type: ignore[misc]  # untyped
        def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            if not life.is_long and trainer.global_step == 2:
                trainer.save_checkpoint(life.folder / "last.ckpt")
            life.step(skerry.learner, module)

    module = model()
    trainer = lightning.Trainer(
        max_steps=STEPS, accelerator="cpu", devices=2, strategy=strategy, callbacks=[skerry, _Told()], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data: Any = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    path = life.folder / "last.ckpt" if life.name == "resumed" else None
    trainer.fit(module, DataLoader(data, batch_size=4, num_workers=1, persistent_workers=True), ckpt_path=path)
    life.end(module)
    trainer.save_checkpoint(life.folder / "merged")


if __name__ == "__main__":
    kind, where, out, life_name = sys.argv[1:]
    rank_life = _Life(where, Path(out), life_name)
    match kind:
        case "transformers":
            _transformers(rank_life)
        case "fsdp":
            config = {"version": 2, "state_dict_type": "FULL_STATE_DICT"}
            wrapped = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
            _transformers(rank_life, fsdp="full_shard", fsdp_config=config | wrapped)
        case "lightning":
            _lightning(rank_life)
        case "model_parallel":
            parts: Any = {"data_parallel_size": 2, "tensor_parallel_size": 1, "save_distributed_checkpoint": False}
            _lightning(rank_life, _Sharded, ModelParallelStrategy(**parts))
