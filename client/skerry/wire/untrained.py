"""What a model has besides the tensors that a run trains: frozen parameters, and buffers."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from skerry.wire.layout import MAX_DIMS, MAX_TENSOR_NAME_BYTES

# Elements that are summed up at a time.
_PIECE_NUMEL: Final = 2**20


class UntrainedTensor(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tensor that is not exchanged; its fields are also those of its JSON in a store.

    Raises:
        ValueError: a field is not legal.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str  # as the framework calls it, for example "bfloat16" or "uint8"
    checksum: int | None = None  # of its values, `values_checksum`; None: each learner has its own

    def __post_init__(self) -> None:
        """Checks what a client may send."""
        if not 1 <= len(self.name.encode()) <= MAX_TENSOR_NAME_BYTES or len(self.dtype) > MAX_TENSOR_NAME_BYTES:
            raise ValueError(f"name or type of an untrained tensor is empty or too long. name={self.name[:80]!r}")
        if len(self.shape) > MAX_DIMS or any(size < 0 for size in self.shape):
            raise ValueError(f"shape of an untrained tensor is not legal. name={self.name[:80]!r}")


def values_checksum(bits: NDArray[Any]) -> int:
    """Returns the checksum of a tensor's values: their bits, as integers of their size, weighted by their places.

    The sum over all elements of their bits, times the product of their indices from 1 on, modulo 2^64. Integers of one
    byte are unsigned, all others signed.
    """
    bits = bits.reshape(bits.shape or 1)
    rows = max(1, _PIECE_NUMEL * len(bits) // max(1, bits.size))
    total = 0
    for start in range(0, len(bits), rows):
        piece = bits[start : start + rows].astype(np.int64)
        for dim in reversed(range(piece.ndim)):
            indices = np.arange(1, 1 + piece.shape[dim]) + (start if dim == 0 else 0)
            piece = (piece * indices).sum(axis=dim, dtype=np.int64)
        total += int(piece)
    return total % 2**64
