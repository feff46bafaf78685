"""torchtitan trains its smallest Llama on CPUs by the recipe in examples; torchrun starts the ranks.

`torchrun titan_on_cpu.py LEARNER STEPS FOLDER`: the first rank writes the model's weights to FOLDER at the end. The
ranks of the learner "killed" have shards of the model, those of others are tensor parallel. torchtitan is made for GPUs
and nightly builds of PyTorch; what it needs of them and a released build does not have on a CPU is replaced here.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from torch import distributed
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils

# Before anything else of torchtitan is imported, which takes over these names.
utils.device_type = "cpu"
utils.device_module = SimpleNamespace(
    set_device=lambda _: None,
    device_count=lambda: 1,
    current_device=lambda: 0,
    get_device_name=lambda _: "cpu",
    get_device_properties=lambda _: SimpleNamespace(total_memory=2**34),
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
    synchronize=lambda: None,
    memory_stats=lambda _: {"num_alloc_retries": 0, "num_ooms": 0},
)

from torchtitan.hf_datasets import DatasetConfig, text_datasets  # noqa: E402
from torchtitan.models import llama3  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402

_set_divide_factor = FSDPModule.set_gradient_divide_factor


def _sum_and_divide(self: FSDPModule, factor: float) -> None:
    self.set_force_sum_reduction_for_comms(enable=True)  # gloo can't divide by itself
    _set_divide_factor(self, factor)


def replace_what_needs_gpus() -> None:
    llama3.get_attention_config = lambda _: ScaledDotProductAttention.Config()  # FlexAttention trains on GPUs only
    FSDPModule.set_gradient_divide_factor = _sum_and_divide  # type: ignore[method-assign]
    if not hasattr(distributed, "set_timeout"):
        distributed.set_timeout = lambda *_: None  # type: ignore[attr-defined]


def configured(folder: Path, steps: int, tensor_parallel: int) -> Any:
    text = Path(__file__).parents[3].joinpath("protos", "skerry", "v1", "types.proto").read_text("utf-8")
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel()
    tokenizer.train_from_iterator([text], BpeTrainer(vocab_size=500, special_tokens=["<s>", "</s>"]))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    text_datasets.DATASETS["page"] = DatasetConfig(
        path="", loader=lambda _: Dataset.from_dict({"text": [text] * 4}), sample_processor=lambda one: one["text"]
    )
    config = llama3_debugmodel()
    config.hf_assets_path = config.dump_folder = str(folder)
    config.dataloader.dataset = "page"
    config.training.seq_len, config.training.local_batch_size, config.training.steps = 32, 2, steps
    config.training.disable_cuda_graphs = True
    # A CPU's seconds go into dispatch and into bfloat16, which it multiplies one number at a time.
    del config.model_spec.model.layers[2:]
    config.training.mixed_precision_param, config.activation_checkpoint = "float32", None
    config.validator.enable = False
    config.parallelism.tensor_parallel_degree = tensor_parallel
    config.parallelism.spmd_backend = "partial_dtensor"  # the default needs a nightly build
    return config


def main() -> None:
    learner_id, steps, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    tensor_parallel = 1 if learner_id == "killed" else int(os.environ["WORLD_SIZE"])
    replace_what_needs_gpus()
    trainer = configured(folder / os.environ["RANK"], steps, tensor_parallel).build()
    options = {"target": os.environ["SKERRY_TARGET"], "run": "titan", "learner_id": learner_id, "create": True}
    batch_count = int(os.environ["WORLD_SIZE"]) // tensor_parallel
    recipe = Path(__file__).parents[3].joinpath("examples", "torchtitan_recipe").with_suffix(".py")
    train_with_skerry = runpy.run_path(str(recipe))["train_with_skerry"]
    train_with_skerry(trainer, tokens_per_step=2 * 32 * batch_count, **options)
    (model,) = trainer.model_parts
    whole = {name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in model.named_parameters()}
    if os.environ["RANK"] == "0":
        torch.save({name: weights.detach().clone() for name, weights in whole.items()}, folder / "merged.pt")
    trainer.close()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
