"""Makes an adapter file of PEFT's of an exported file, by one that `save_pretrained` has written."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import safetensors

from skerry.runtime.files import replacing
from skerry.wire.base_model import BaseTensor
from skerry.wire.safetensors import header_bytes, read_file_header

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


def check_adapter(names: Mapping[str, tuple[int, ...]], like: Path) -> dict[str, str]:
    """Returns the name in an adapter file of each of a run's tensors, given with their shapes.

    Args:
        names: the run's tensors.
        like: a file that PEFT has written of the same adapter.

    Raises:
        ValueError: they are not of such an adapter, or PEFT saves what it computes of them.
    """
    if encoded := next((name for name in names if _ENCODED.match(name)), None):
        raise ValueError(
            "PEFT saves what the prompt encoder computes of its parameters, not these. Attach the model, leave with "
            f"load_merged=True, and call save_pretrained. parameter={encoded}"
        )
    saved = read_file_header(like)
    keys: dict[str, str] = {}
    for name, shape in names.items():
        key = name if name in saved else adapter_key(name)
        if key not in saved:  # as of a tensor that several layers share
            last = key.rpartition(".")[2]
            key = next((other for other in saved if other.rpartition(".")[2] == last), key)
        if key not in saved or saved[key].shape != shape or key in keys.values():
            of_like = saved[key].shape if key in saved else "no tensor"
            raise ValueError(
                'the run is not of the adapter in --like, or that is not called "default", which is what PEFT calls '
                f"one by default. tensor={name}, shape={shape}, like={of_like}"
            )
        keys[name] = key
    return keys


def write_adapter(path: Path, like: Path) -> None:
    """Replaces an exported file by an adapter file: with PEFT's names, and with what the run does not train of `like`.

    Raises:
        ValueError: as `check_adapter`.
    """
    own = read_file_header(path)
    keys = check_adapter({name: place.shape for name, place in own.items()}, like)
    with safetensors.safe_open(path, framework="np") as file:
        metadata: dict[str, str] = file.metadata() or {}
    tensors = {key: BaseTensor(like, place) for key, place in read_file_header(like).items()}
    tensors |= {keys[name]: BaseTensor(path, place) for name, place in own.items()}

    def item_bytes(pair: tuple[str, BaseTensor]) -> float:
        return -pair[1].place.size_bytes / max(1, math.prod(pair[1].place.shape))

    ordered = dict(sorted(tensors.items(), key=item_bytes))  # so that all are aligned
    with replacing(path) as out:
        out.write(header_bytes({key: one.place for key, one in ordered.items()}, metadata))
        for tensor in ordered.values():
            out.writelines(tensor.pieces())
