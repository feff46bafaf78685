"""Makes frames from torch tensors, quantised on their own device, so that only codes and scales are copied to the host.

Each operation here is that of `skerry.wire.quantise`, on a float32 or integer tensor, so the frames are equal in every
byte. On a GPU, dividing by a Python number multiplies by its reciprocal, so divisors are tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from blake3 import blake3

from skerry.wire.codecs import Codec, Cut, Encoding, cut_frames
from skerry.wire.frames import pack_frame
from skerry.wire.layout import blocks_of
from skerry.wire.quantise import LARGEST_FLOAT32, LARGEST_SCALED, SMALLEST_SCALE, non_finite_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from skerry.wire.layout import Blocks, FragmentLayout

BATCH_NUMEL: Final = 2**24
"""Elements quantised at once: enough to hide a GPU's launches and copies, at about a quarter gigabyte of scratch."""


def encode_frames_torch(
    values: torch.Tensor,  # (numel of the range,) float32, on any device
    layout: FragmentLayout,
    encoding: Encoding,
    *,
    first: int = 0,
    base: torch.Tensor | None = None,
    decoded: torch.Tensor | None = None,
    digest: blake3 | None = None,
) -> Iterator[bytes]:
    """Yield the frames that `encode_frames` would make of the same values, or of base - values where `base` is given.

    `decoded`, when given, is overwritten on its own device with what a receiver will decode; it may be `values` itself.

    Raises:
        ValueError: (at once) a tensor is not one-dimensional float32, or the range is not cut at block boundaries.
        NonFiniteError: (from the batch that meets it) a value that the codec cannot carry.
    """
    for name, tensor in (("values", values), ("base", base), ("decoded", decoded)):
        if tensor is not None and (tensor.dtype != torch.float32 or tensor.shape != (values.numel(),)):
            msg = f"{name} must be one-dimensional float32. dtype={tensor.dtype}, shape={tuple(tensor.shape)}"
            raise ValueError(msg)
    cuts = cut_frames(layout, encoding, first, values.numel())
    detached = values.detach()

    def frames() -> Iterator[bytes]:
        for batch in _batches(cuts):
            whole = Cut(batch[0].codec, batch[0].block, batch[0].first, sum(cut.numel for cut in batch))
            inside = slice(whole.first - first, whole.first - first + whole.numel)
            with torch.no_grad():
                piece = detached[inside] if base is None else base[inside] - detached[inside]
                quantised = _quantise(whole, piece, layout)
                if quantised is None:
                    raise non_finite_error(piece.cpu().numpy(), layout, whole)
                if decoded is not None:
                    decoded[inside] = quantised.values.to(decoded.device)
            for cut, raw in _raw_frames(batch, quantised, layout):
                if digest is not None:
                    digest.update(raw.data)
                yield pack_frame(cut, raw, encoding)

    return frames()


def _batches(cuts: Iterable[Cut]) -> Iterator[list[Cut]]:
    """Group frames that can be quantised and packed in one go: one codec, and nibbles that pair up alike."""
    batch: list[Cut] = []
    numel = 0
    for cut in cuts:
        if batch and (cut.codec is not batch[0].codec or numel % 2 or numel + cut.numel > BATCH_NUMEL):
            yield batch
            batch, numel = [], 0
        batch.append(cut)
        numel += cut.numel
    if batch:
        yield batch


@dataclass(frozen=True)
class _Quantised:
    scales: NDArray[np.float32]  # (count,) on the host
    codes: NDArray[np.uint8]  # (code_size,) on the host
    values: torch.Tensor  # (numel,) float32 on the device: what a receiver decodes


def _quantise(cut: Cut, values: torch.Tensor, layout: FragmentLayout) -> _Quantised | None:
    """Return codes and scales; None when a value is beyond the codec."""
    if not cut.codec.has_blocks:
        if not bool((values.abs() <= float(LARGEST_FLOAT32)).all()):
            return None
        return _Quantised(np.empty(0, np.float32), _host_array(values.contiguous()).view(np.uint8), values)
    blocks = blocks_of(layout, cut.first, cut.numel, cut.block)
    places = _places(blocks, values.device)
    rows = _rows(values, blocks, places)  # (blocks, block)
    largest = rows.abs().amax(dim=1)
    if not bool((largest <= float(LARGEST_SCALED)).all()):
        return None
    scales = largest / torch.full_like(largest, cut.codec.top_code)
    is_zero = scales < float(SMALLEST_SCALE)
    scales.masked_fill_(is_zero, 0.0)
    quotients = rows / scales.masked_fill(is_zero, torch.inf).unsqueeze(1)
    rounded = quotients.round_().to(torch.int8)
    codes, levels = rounded.view(torch.uint8), rounded.float()
    codes, decoded = (_flat(each, places) for each in (codes, levels.mul_(scales.unsqueeze(1))))
    packed = codes if cut.codec is Codec.INT8 else _pack_nibbles(codes)
    return _Quantised(_host_array(scales), _host_array(packed), decoded)


def _host_array(tensor: torch.Tensor) -> NDArray[Any]:
    """Return the values on the host; a GPU copies them to pinned memory, and only the caller's stream is waited for."""
    if not tensor.is_cuda:
        return tensor.cpu().numpy()
    pinned = torch.empty_like(tensor, device="cpu", pin_memory=True)
    pinned.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return pinned.numpy()


def _places(blocks: Blocks, device: torch.device) -> torch.Tensor | None:
    """Return `(numel,)`: where each element is among rows of whole blocks; None where all blocks are whole."""
    if blocks.numel == blocks.count * blocks.size:
        return None
    lengths = torch.from_numpy(blocks.lengths).to(device)
    padding = torch.from_numpy(np.arange(blocks.count) * blocks.size - blocks.edges[:-1].astype(np.int64)).to(device)
    return torch.arange(blocks.numel, device=device) + padding.repeat_interleave(lengths, output_size=blocks.numel)


def _rows(values: torch.Tensor, blocks: Blocks, places: torch.Tensor | None) -> torch.Tensor:
    """Return `(count, size)`: a block in each row, and zeros behind those that are short."""
    if places is None:
        return values.reshape(blocks.count, blocks.size)
    rows = values.new_zeros(blocks.count * blocks.size)
    rows[places] = values
    return rows.view(blocks.count, blocks.size)


def _flat(rows: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
    """Return `(numel,)`: the elements of rows that `_rows` made."""
    flat = rows.reshape(-1)
    return flat if places is None else flat[places]


def _pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Return two 4-bit codes a byte, low nibble first; an odd count's last high nibble is 0."""
    if len(codes) % 2:
        codes = torch.cat([codes, codes.new_zeros(1)])
    return (codes[0::2] & 15) | (codes[1::2] << 4)


def _raw_frames(
    batch: list[Cut], quantised: _Quantised, layout: FragmentLayout
) -> Iterator[tuple[Cut, NDArray[np.uint8]]]:
    """Yield each frame's raw bytes, from the batch's scales and codes on the host."""
    scale_at = code_at = 0
    for cut in batch:
        block_count = blocks_of(layout, cut.first, cut.numel, cut.block).count if cut.block else 0
        code_size = cut.codec.code_size(cut.numel)
        scales = quantised.scales[scale_at : scale_at + block_count].view(np.uint8)
        yield cut, np.concatenate([scales, quantised.codes[code_at : code_at + code_size]])
        scale_at += block_count
        code_at += code_size
