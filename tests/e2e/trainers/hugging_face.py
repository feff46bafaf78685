"""A small model of Hugging Face, and a trainer that trains it for a few steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments


def llama() -> Any:
    """Returns a Llama of one layer."""
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    )


def trainer_of(folder: Path, *callbacks: TrainerCallback, model: Any = None, **arguments: Any) -> Trainer:
    """Returns a trainer of 6 steps of 2 rows of 8 tokens, or as the arguments say."""
    shared = {"max_steps": 6, "per_device_train_batch_size": 2, "logging_steps": 1, "dataloader_num_workers": 2}
    row = torch.arange(8)
    return Trainer(
        llama() if model is None else model,
        TrainingArguments(str(folder), use_cpu=True, disable_tqdm=True, **(shared | arguments)),
        train_dataset=[{"input_ids": row, "labels": row}] * 64,
        eval_dataset=[{"input_ids": row, "labels": row}] * 4,
        callbacks=list(callbacks),
    )
