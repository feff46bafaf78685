"""What a torch module has besides the parameters that are trained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from skerry.model.torch.shards import Region, local_part, region_of
from skerry.wire.untrained import UntrainedTensor

# Elements that are summed up at a time, as int64.
_PIECE_NUMEL: Final = 2**22
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class FrozenPart(NamedTuple):
    """What a process holds of a frozen parameter."""

    region: Region
    checksum: int


def persistent_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the buffers that are in the module's state dict, by path."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:  # noqa: SLF001 - state_dict() would copy what it unshards
                yield f"{path}.{name}" if path else name, buffer


def frozen_parts(frozen: Mapping[str, torch.Tensor]) -> dict[str, FrozenPart]:
    """Returns what this process holds of frozen parameters, with checksums of their values; reads all of it.

    Those that can't be read are left out: on the meta device, sparse, nested or of a quantised type.
    """
    parts = {}
    for name, tensor in frozen.items():
        if is_readable(tensor):
            region = region_of(name, tensor)
            parts[name] = FrozenPart(region, int(checksum(local_part(tensor.detach()), region.first)))
    return parts


def untrained_tensors(
    frozen: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor], parts: Mapping[str, Iterable[FrozenPart]]
) -> tuple[UntrainedTensor, ...]:
    """Returns frozen parameters and buffers. Those have checksums of which all elements are in `parts`, each once."""
    return tuple(
        UntrainedTensor(
            name,
            () if is_lazy(tensor) or tensor.is_nested else tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            _combined(tensor, parts.get(name, ())),
        )
        for name, tensor in {**frozen, **buffers}.items()
    )


def _combined(tensor: torch.Tensor, parts: Iterable[FrozenPart]) -> int | None:
    held = [*parts]
    if not held or sum(part.region.numel for part in held) != tensor.numel():
        return None
    return sum(part.checksum for part in held) % 2**64


def is_readable(tensor: torch.Tensor) -> bool:
    """Whether what this process holds of a tensor is in memory, as plain values."""
    if is_lazy(tensor) or tensor.is_nested or tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    part = local_part(tensor)
    return part.device.type != "meta" and not is_traceable_wrapper_subclass(part)


def checksum(tensor: torch.Tensor, first: Sequence[int] = ()) -> torch.Tensor:
    """Returns the sum over all elements of their bits, times the product of their indices from 1 on, modulo 2^64.

    `first` is the index of the tensor's first element in a tensor of which it is a box: sums of boxes add up to that
    of the whole. On a GPU nothing waits for the sum.
    """
    if not tensor.dim():
        tensor = tensor.reshape(1)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    bits = tensor.view(_INTEGERS[tensor.element_size()])
    first = [*first, *[0] * (bits.dim() - len(first))]
    rows = max(1, _PIECE_NUMEL * len(bits) // max(1, bits.numel()))
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), rows):
        piece = bits[start : start + rows]
        for dim in reversed(range(bits.dim())):
            begin = first[dim] + 1 + (start if dim == 0 else 0)
            indices = torch.arange(begin, begin + piece.shape[dim], device=bits.device)
            piece = (piece * indices).sum(dim)
        total += piece
    return total
