"""A LoRA adapter as a run: only the adapter is exchanged, and PEFT loads what comes out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from skerry.cli.adapters import adapter_key
from skerry.cli.main import cli
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
    out = train_two_islands("lora", target, "lora", tmp_path)
    loaded = PeftModel.from_pretrained(_base(), out, is_trainable=True)
    assert_merged(target, "lora", _trained(loaded))
    with RunsClient(target) as runs:
        names = {tensor.name for tensor in runs.get_run("lora").run.tensors}
    assert names == _trained(loaded).keys()
    assert all("lora_" in name or "modules_to_save" in name for name in names)

    words = ["export", "lora", "--target", target, "--format", "peft", "--out", str(tmp_path / "merged")]
    done = CliRunner().invoke(cli, [*words, "--like", str(out)])
    assert done.exit_code == 0, done.output
    saved, exported = (load_file(folder / "adapter_model.safetensors") for folder in (out, tmp_path / "merged"))
    assert saved.keys() == exported.keys()
    again = PeftModel.from_pretrained(_base(), tmp_path / "merged", is_trainable=True)
    assert_merged(target, "lora", _trained(again))


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head", "norm"]),
        LoraConfig(target_modules=["q_proj", "v_proj"], use_dora=True),
        IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    ],
    ids=["lora", "dora", "ia3"],
)
def test_parameters_have_the_names_that_peft_saves_them_under(config: Any) -> None:
    model = get_peft_model(_base(), config)
    saved = get_peft_model_state_dict(model, save_embedding_layers=False)
    assert {adapter_key(name) for name in _trained(model)} == saved.keys()
