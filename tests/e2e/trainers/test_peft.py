"""A LoRA adapter as a run: only the adapter is exchanged, and PEFT loads what comes out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from peft import (
    LoraConfig,
    MultitaskPromptTuningConfig,
    PeftModel,
    PromptEncoderConfig,
    TrainableTokensConfig,
    VBLoRAConfig,
    get_peft_model,
)
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from skerry import Learner, RunsClient
from skerry.cli.main import cli
from tests.e2e.trainers.two_islands import assert_merged, train_two_islands


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


_OF = {"task_type": "CAUSAL_LM"}
_IN = {"target_modules": ["q_proj", "v_proj"], **_OF}
_PROMPT = {"num_virtual_tokens": 4, **_OF}
# One of each way in which PEFT names what it saves.
_CONFIGS: dict[str, Callable[[], Any]] = {
    "dora": lambda: LoraConfig(use_dora=True, **_IN),
    "rslora with biases": lambda: LoraConfig(use_rslora=True, bias="all", **_IN),
    "lora of embeddings": lambda: LoraConfig(target_modules=["embed_tokens", "q_proj"], **_OF),
    "modules_to_save": lambda: LoraConfig(modules_to_save=["lm_head", "norm"], **_IN),
    "multitask prompt": lambda: MultitaskPromptTuningConfig(num_tasks=2, **_PROMPT),
    "tokens": lambda: TrainableTokensConfig(token_indices=[1, 2], target_modules=["embed_tokens"], **_OF),
    "vblora, of shared vectors": lambda: VBLoRAConfig(num_vectors=8, vector_length=8, topk=2, r=4, **_IN),
}


def _exported(target: str, config: Any, folder: Path) -> tuple[Any, Result]:
    """Trains nothing, but creates the run of an adapter, with weights that are no initial ones, and exports it."""
    torch.manual_seed(1)
    model = get_peft_model(_base(), config)
    model.save_pretrained(folder / "like")
    with torch.no_grad():
        for parameter in _trained(model).values():
            parameter.copy_(torch.rand_like(parameter))
    Learner(model, target=target, run="tuned", learner_id="us", create=True).close()
    words = ["export", "tuned", "--target", target, "--format", "peft", "--out", str(folder / "merged")]
    return model, CliRunner().invoke(cli, [*words, "--like", str(folder / "like")])


@pytest.mark.parametrize("kind", _CONFIGS)
def test_peft_loads_an_exported_adapter_of_every_kind(target: str, tmp_path: Path, kind: str) -> None:
    model, done = _exported(target, _CONFIGS[kind](), tmp_path)
    assert done.exit_code == 0, done.output
    model.save_pretrained(tmp_path / "saved")
    saved, exported = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("saved", "merged"))
    assert saved.keys() == exported.keys()
    assert all(torch.equal(saved[name], exported[name]) for name in saved)
    again = PeftModel.from_pretrained(_base(), tmp_path / "merged")
    tokens = torch.arange(8).view(1, 8)
    more = {"task_ids": torch.zeros(1, dtype=torch.long)} if kind == "multitask prompt" else {}
    with torch.no_grad():
        outputs = [one.eval()(input_ids=tokens, **more).logits for one in (model, again)]
    assert torch.equal(*outputs)


def test_an_adapter_of_which_peft_saves_what_it_computes_is_refused(target: str, tmp_path: Path) -> None:
    _, done = _exported(target, PromptEncoderConfig(encoder_hidden_size=16, **_PROMPT), tmp_path)
    assert done.exit_code == 2
    assert "PEFT saves what the prompt encoder computes" in done.output
    assert "call save_pretrained" in done.output
    assert not (tmp_path / "merged" / "adapter_model.safetensors").exists()
