"""The names that a run's tensors have in an adapter file of PEFT's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from skerry.wire.safetensors import read_file_header

# `...lora_A.default.weight`, `...lora_embedding_A.default`: the name that PEFT gives an adapter unless told otherwise.
_ADAPTER: Final = re.compile(r"\.default(?=(\.[^.]+)?$)")
_SAVED_MODULE: Final = re.compile(r"\.modules_to_save\.default(?=\.)")
# Saved without the layer that it became in later versions.
_MAGNITUDE: Final = re.compile(r"(\.lora_magnitude_vector)\.default\.weight$")
# The embeddings of prompts, and what multitask prompts have beside them.
_PROMPT: Final = re.compile(r"^prompt_encoder\.default\.embedding\.weight$")
_PROMPTS_TASK: Final = re.compile(r"^prompt_encoder\.default\.(?=prefix_task_)")
# An encoder computes the embeddings that PEFT saves from what is trained: p-tuning, projected prefixes, CPT.
_ENCODED: Final = re.compile(r"^prompt_encoder\.default\.(transform|mlp_head|lstm_head|delta_embedding)\b")


def adapter_key(name: str) -> str:
    """Returns the name in a file of PEFT's of a model's parameter: without the name of the adapter, "default"."""
    name = _PROMPTS_TASK.sub("", _PROMPT.sub("prompt_embeddings", name))
    return _ADAPTER.sub("", _SAVED_MODULE.sub("", _MAGNITUDE.sub(r"\1", name)))


def adapter_keys(shapes: Mapping[str, tuple[int, ...]], like: Path) -> dict[str, str]:
    """Returns the name in an adapter file of each of a run's tensors.

    Args:
        shapes: of the run's tensors, by name.
        like: a file that PEFT's `save_pretrained` has written of the same adapter.

    Raises:
        ValueError: they are not of such an adapter, or PEFT saves what it computes of them.
    """
    if encoded := next((name for name in shapes if _ENCODED.match(name)), None):
        raise ValueError(
            "PEFT saves what the prompt encoder computes of its parameters, not these. Attach the model, leave with "
            f"load_merged=True, and call save_pretrained. parameter={encoded}"
        )
    saved = read_file_header(like)
    keys: dict[str, str] = {}
    for name, shape in shapes.items():
        key = name if name in saved else adapter_key(name)
        if key not in saved:  # as of a tensor that several layers share
            last = key.rpartition(".")[2]
            key = next((other for other in saved if other.rpartition(".")[2] == last), key)
        if key not in saved or saved[key].shape != shape or key in keys.values():
            like_shape = saved[key].shape if key in saved else "no tensor"
            raise ValueError(
                'the run is not of the adapter in --like, or that has another name than PEFT\'s own, "default". '
                f"tensor={name}, shape={shape}, like={like_shape}"
            )
        keys[name] = key
    return keys
