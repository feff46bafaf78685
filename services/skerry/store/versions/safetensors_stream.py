"""Writes safetensors a piece at a time, so that a snapshot of any size needs no second copy in memory.

The format: a little-endian u64 with the header's size, the header (JSON, padded with spaces to a multiple of 8), then
every tensor's bytes in row-major order. Specified by the safetensors project; readable by its libraries.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from skerry.store.objects.interface import STREAM_CHUNK_BYTES

_METADATA: Final = "__metadata__"
_DTYPES: Final = {
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float64": ("F64", 8),
}


def tensor_key(name: str, names: Iterable[str]) -> str:
    """Returns the name that the tensor `name` has in the file: its own, unless the format keeps that for itself.

    A tensor called `__metadata__` becomes `__metadata__.tensor`, with enough `.tensor` to tell it from all others.
    """
    if name != _METADATA:
        return name
    taken = set(names)
    key = f"{_METADATA}.tensor"
    while key in taken:
        key += ".tensor"
    return key


def header_bytes(tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Returns the file's beginning for tensors of these (dtype, shape), which follow in this order.

    Raises:
        ValueError: a dtype that the format does not have here.
    """
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        if dtype not in _DTYPES:
            raise ValueError(f"element type can't be written. tensor={name}, dtype={dtype}, known={sorted(_DTYPES)}")
        code, item_bytes = _DTYPES[dtype]
        size = item_bytes * int(np.prod(shape, dtype=np.int64))
        key = tensor_key(name, tensors)
        header[key] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def float32_bytes(values: NDArray[np.float32]) -> Iterator[bytes]:
    """Yields the little-endian bytes of `values` in row-major order, a piece at a time."""
    flat = np.ascontiguousarray(values).reshape(-1).astype("<f4", copy=False)
    step = STREAM_CHUNK_BYTES // 4
    for start in range(0, len(flat), step):
        yield flat[start : start + step].tobytes()
