"""A LoRA adapter as a run: only the adapter is exchanged, and PEFT loads what comes out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import LlamaConfig, LlamaForCausalLM

from skerry.client import RunsClient
from tests.integrations.two_islands import assert_merged, train_two_islands


def _base() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    )


def _trained(model: Any) -> dict[str, torch.Tensor]:
    return {name: one for name, one in model.named_parameters() if one.requires_grad}


def test_two_islands_one_is_killed_and_peft_loads_the_merged_adapter(target: str, tmp_path: Path) -> None:
    out = train_two_islands("train_lora.py", target, "lora", tmp_path)
    loaded = PeftModel.from_pretrained(_base(), out, is_trainable=True)
    assert_merged(target, "lora", _trained(loaded))
    with RunsClient(target) as runs:
        names = {tensor.name for tensor in runs.get_run("lora").run.tensors}
    assert names == _trained(loaded).keys()
    assert all("lora_" in name or "modules_to_save" in name for name in names)
