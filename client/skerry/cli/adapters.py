"""Gives the tensors of an exported file the names that PEFT gives those of an adapter."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from skerry.wire.safetensors import rename_tensors

# `...lora_A.default.weight`, `...lora_embedding_A.default`: the name that PEFT gives an adapter unless told otherwise.
_ADAPTER: Final = re.compile(r"\.default(?=(\.[^.]+)?$)")
_SAVED_MODULE: Final = re.compile(r"\.modules_to_save\.default(?=\.)")
# Saved without the layer that it became in later versions.
_MAGNITUDE: Final = re.compile(r"(\.lora_magnitude_vector)\.default\.weight$")


def adapter_key(name: str) -> str:
    """Returns the name in a file of PEFT's of a model's parameter: without the name of the adapter, "default"."""
    return _ADAPTER.sub("", _SAVED_MODULE.sub("", _MAGNITUDE.sub(r"\1", name)))


def name_as_adapter(path: Path) -> None:
    """Renames the tensors of a safetensors file, in place.

    Raises:
        ValueError: none of them belongs to an adapter.
    """
    if not rename_tensors(path, adapter_key):
        raise ValueError(
            f'no tensor belongs to an adapter called "default", which is what PEFT calls one by default. path={path}'
        )
