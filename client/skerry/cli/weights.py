"""Reads the initial weights of a run from a safetensors file as float32 arrays, without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import safetensors
from numpy.typing import NDArray

_NUMPY_TYPES: Final = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}


def read_weights(path: Path) -> dict[str, NDArray[np.float32]]:
    """Returns the tensors of a safetensors file by name, converted to float32.

    Raises:
        ValueError: the file is not a safetensors file, has no tensor, or has one that is not floating-point.
    """
    try:
        tensors = safetensors.deserialize(path.read_bytes())  # type: ignore[no-untyped-call]  # it has no annotations
    except safetensors.SafetensorError as error:
        raise ValueError(f"not a safetensors file. file={path}, because={error}") from error
    if not tensors:
        raise ValueError(f"the file has no tensor. file={path}")
    return {name: _to_float32(name, tensor) for name, tensor in tensors}


def _to_float32(name: str, tensor: dict[str, Any]) -> NDArray[np.float32]:
    shape: list[int] = tensor["shape"]
    if tensor["dtype"] == "BF16":
        # A bfloat16 is the upper half of a float32.
        halves = np.frombuffer(tensor["data"], dtype="<u2")
        return (halves.astype(np.uint32) << 16).view(np.float32).reshape(shape)
    if tensor["dtype"] not in _NUMPY_TYPES:
        raise ValueError(f"only floating-point tensors can be trained. tensor={name}, dtype={tensor['dtype']}")
    return np.frombuffer(tensor["data"], dtype=_NUMPY_TYPES[tensor["dtype"]]).astype(np.float32).reshape(shape)
