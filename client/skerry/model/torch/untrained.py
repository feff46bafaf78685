"""What a torch module has besides the parameters that are trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from skerry.model.torch.shards import is_cut, local_part
from skerry.wire.untrained import UntrainedTensor, values_digest

# Copied from a GPU, or gathered from other ranks, at a time.
PIECE_BYTES: Final = 2**26


def persistent_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the buffers that are in the module's state dict, by path."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:  # noqa: SLF001 - state_dict() would copy what it unshards
                yield f"{path}.{name}" if path else name, buffer


def untrained_tensors(
    frozen: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
) -> tuple[UntrainedTensor, ...]:
    """Returns frozen parameters with the digests of their values, and buffers without; reads all of the former.

    A parameter that can't be read here has no digest either: it is on the meta device, sparse, nested, of a quantised
    type, or this process holds a part of it.
    """
    return tuple(
        UntrainedTensor(
            name,
            () if is_lazy(tensor) or tensor.is_nested else tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            values_digest(pieces(local_part(tensor)))
            if name in frozen and is_readable(tensor) and not is_cut(tensor)
            else b"",
        )
        for name, tensor in {**frozen, **buffers}.items()
    )


def is_readable(tensor: torch.Tensor) -> bool:
    """Whether what this process holds of a tensor is in memory, as plain values."""
    if is_lazy(tensor) or tensor.is_nested or tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    part = local_part(tensor)
    return part.device.type != "meta" and not is_traceable_wrapper_subclass(part)


def pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yields the tensor's bytes in row-major order."""
    for piece in as_bytes(tensor.detach().resolve_conj().resolve_neg().contiguous()).split(PIECE_BYTES):  # type: ignore[no-untyped-call]
        yield piece.cpu().numpy().data


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a contiguous tensor, which share its memory."""
    return tensor.reshape(-1).view(torch.uint8)
