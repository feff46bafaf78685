"""Converts float32 to a frame's raw bytes and back, a frame at a time: in NumPy, or in kernels that do the same.

Every step is one IEEE float32 operation, rounded to nearest even, or an integer operation. So NumPy, kernels, torch and
all machines write the same bytes and read the same values. This holds also where subnormal numbers are flushed to zero:
scales are so far above the subnormal range that a subnormal element rounds to code 0 in either case.

Norms of a frame's elements are computed here too, because they can be computed from its codes.
"""

from __future__ import annotations

from types import ModuleType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from skerry.wire.codecs import MAX_FRAME_NUMEL, Codec, Cut, PerThread
from skerry.wire.errors import FrameError, NonFiniteError, WireReason
from skerry.wire.kernels import kernels_for
from skerry.wire.layout import Blocks, FragmentLayout

LARGEST_FLOAT32: Final = np.finfo(np.float32).max
LARGEST_SCALED: Final = np.float32(2.0**127)
"""Largest magnitude that block codecs carry, so that no code times its scale overflows."""
SMALLEST_SCALE: Final = np.float32(2.0**-125)
"""Blocks whose scale would be smaller are written as zeros. From here on a subnormal element is below half a step."""
_ONE: Final = np.uint32(1)
_SQUARED_NUMEL: Final = 2**16
"""Elements squared at a time: half a megabyte of float64 that stays in cache, however large the fragment."""

_frame: Final = PerThread(lambda: np.empty(5 * MAX_FRAME_NUMEL, np.uint8))


def empty_frame(codec: Codec, blocks: Blocks) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.uint8]]:
    """Return memory for a frame's raw bytes, valid until this thread's next call, and views of its scales and codes."""
    raw = _frame.value[: codec.raw_size(blocks.numel, blocks.count)]
    return raw, raw[: 4 * blocks.count].view(np.float32), raw[4 * blocks.count :]


def quantise(
    codec: Codec,
    values: NDArray[np.float32],  # (numel,) contiguous
    blocks: Blocks | None,  # of exactly these values; None where the codec has none
    decoded: NDArray[np.float32] | None = None,  # (numel,) contiguous, written; may be `values`
) -> NDArray[np.uint8] | None:
    """Return the raw bytes, valid until this thread's next call; None when a value is beyond the codec.

    `decoded`, when given, is overwritten with what a receiver will decode. When a value is beyond the codec, only
    elements before it are, with values that the codec carries.
    """
    if blocks is None:
        if not (values.max() <= LARGEST_FLOAT32 and values.min() >= -LARGEST_FLOAT32):  # NaN compares false
            return None
        if decoded is not None:
            np.copyto(decoded, values)
        return values.view(np.uint8)
    raw, scales, codes = empty_frame(codec, blocks)
    out = values if decoded is None else decoded
    kernels = kernels_for(values, out)
    if kernels is not None:
        arrays = (values, blocks.edges, scales, codes, out)
        return raw if kernels.quantise(*kernel_limits(codec), *arrays, decoded is not None) else None
    np.maximum.reduceat(np.abs(values), blocks.edges[:-1].astype(np.int64), out=scales)
    if not scales.max() <= LARGEST_SCALED:  # NaN compares false
        return None
    scales /= np.float32(codec.top_code)
    scales[scales < SMALLEST_SCALE] = 0
    divisors = np.where(scales == 0, np.float32(np.inf), scales)
    levels = np.rint(values / np.repeat(divisors, blocks.lengths)).astype(np.int8)
    if codec.bits == 8:
        codes[:] = levels.view(np.uint8)
    else:
        nibbles = np.append(levels, np.zeros(len(levels) % 2, np.int8)).view(np.uint8) & 15
        np.bitwise_or(nibbles[::2], nibbles[1::2] << 4, out=codes)
    if decoded is not None:
        np.multiply(levels, np.repeat(scales, blocks.lengths), out=decoded)
    return raw


def kernel_limits(codec: Codec) -> tuple[int, np.float32, np.float32]:
    """Return what kernels have to know of a codec with blocks: bits, largest code and smallest scale."""
    return codec.bits, np.float32(codec.top_code), SMALLEST_SCALE


def dequantise(
    codec: Codec,
    raw: NDArray[np.uint8],  # exactly codec.raw_size(numel, block_count)
    blocks: Blocks | None,
    out: NDArray[np.float32],  # (numel,) contiguous, written
) -> None:
    """Write the values that `raw` stands for.

    Raises:
        FrameError: NON_FINITE or BAD_SCALE; `out` is then of no use.
    """
    if blocks is None:
        np.copyto(out, raw.view(np.float32))
        if not (out.max() <= LARGEST_FLOAT32 and out.min() >= -LARGEST_FLOAT32):
            raise FrameError(WireReason.NON_FINITE, f"an element is not finite. codec={codec}")
        return
    kernels = kernels_for(out)
    if kernels is not None:
        decode_in_kernels(kernels, codec, raw, blocks, out, use=kernels.STORE)
        return
    scales, codes = _checked(codec, raw, blocks)
    if codec.bits == 8:
        levels = codes.view(np.int8)
    else:
        nibbles = np.stack((codes & 15, codes >> 4), axis=1).reshape(-1)[: blocks.numel]
        levels = (nibbles ^ 8).view(np.int8) - np.int8(8)
    np.multiply(levels, np.repeat(scales, blocks.lengths), out=out)


def decode_in_kernels(
    kernels: ModuleType,
    codec: Codec,
    raw: NDArray[np.uint8],  # exactly codec.raw_size(numel, block_count)
    blocks: Blocks,
    out: NDArray[np.float32],  # (numel,) contiguous, written
    *,
    use: int,  # of `kernels`: what becomes of each value
    coefficients: NDArray[np.float32] | None = None,  # (count,) for the uses that multiply
    source: NDArray[np.float32] | None = None,  # (numel,) for the use that has it
) -> None:
    """Decode and use the values in one sweep.

    Raises:
        FrameError: NON_FINITE or BAD_SCALE; `out` is as it was.
    """
    scales, codes = _checked(codec, raw, blocks)
    optional = scales if coefficients is None else coefficients, out if source is None else source
    kernels.decode(codec.bits, use, codes, blocks.edges, scales, *optional, out)


def per_tensor_squared_norms(
    values: NDArray[np.float32],  # (numel of the range,)
    layout: FragmentLayout,
    first: int = 0,
    norms: NDArray[np.float64] | None = None,
) -> NDArray[np.float64]:
    """Returns `(len(layout.tensors),)`: the sum of squares of what each tensor has in the range, 0 outside it.

    They are added to `norms` where it is given. The sums of disjoint ranges add up to the fragment's. The last bits
    depend on the machine, so a norm is recorded once and never computed again to compare.
    """
    norms = np.zeros(len(layout.tensors), np.float64) if norms is None else norms
    kernels = _kernels_for_norms(values)
    if kernels is not None:
        for index, start, stop in layout.ranges(first, len(values)):
            norms[index] += kernels.square_sum(values[start - first : stop - first])
        return norms
    squares = np.empty(min(_SQUARED_NUMEL, len(values)), np.float64)
    for index, start, stop in layout.ranges(first, len(values)):
        for low in range(start, stop, _SQUARED_NUMEL):
            chunk = values[low - first : min(low + _SQUARED_NUMEL, stop) - first]
            norms[index] += np.square(chunk, out=squares[: len(chunk)], dtype=np.float64).sum()
    return norms


def quantised_squared_norms(
    codec: Codec,
    raw: NDArray[np.uint8],  # of the range, as `dequantise` takes it
    blocks: Blocks | None,
    *,
    layout: FragmentLayout,
    first: int,  # of the range
    scratch: NDArray[np.float32],  # (numel of the range,) written where the range has to be decoded
    norms: NDArray[np.float64] | None = None,
) -> NDArray[np.float64]:
    """Returns `per_tensor_squared_norms` of what a range's raw bytes decode to; adds it to `norms` where given.

    Raises:
        FrameError: NON_FINITE or BAD_SCALE.
    """
    kernels = _kernels_for_norms(scratch)
    if blocks is None or kernels is None:
        dequantise(codec, raw, blocks, scratch)
        return per_tensor_squared_norms(scratch, layout, first, norms)
    scales, codes = _checked(codec, raw, blocks)
    norms = np.zeros(len(layout.tensors), np.float64) if norms is None else norms
    edges, low = blocks.edges, 0
    for index, start, stop in layout.ranges(first, len(scratch)):
        high = low + -(-(stop - start) // blocks.size)
        norms[index] += kernels.squared_norm(codec.bits, codes, edges[low : high + 1], scales[low:high])
        low = high
    return norms


def _kernels_for_norms(values: NDArray[np.float32]) -> ModuleType | None:
    """Returns the kernels for large ranges; in small ones, as simulations have, bits don't depend on what is loaded."""
    return kernels_for(values) if len(values) >= _SQUARED_NUMEL else None


def _checked(codec: Codec, raw: NDArray[np.uint8], blocks: Blocks) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Return the scales and the codes; refuse scales that decode to what is not finite, or depends on the machine."""
    scales = raw[: 4 * blocks.count].view(np.float32)
    if not scales.flags.aligned:  # as in a frame that was not compressed
        scales = scales.copy()
    bits, largest = scales.view(np.uint32), LARGEST_SCALED / np.float32(codec.top_code)
    # Positive numbers order as their bits do; one less makes zero the largest of all.
    if bits.max() > largest.view(np.uint32) or (bits - _ONE).min() < SMALLEST_SCALE.view(np.uint32) - _ONE:
        reason = WireReason.BAD_SCALE if np.isfinite(scales).all() else WireReason.NON_FINITE
        raise FrameError(reason, f"a block's scale is not finite or out of range. codec={codec}")
    return scales, raw[4 * blocks.count :]


def check_range_array(name: str, array: NDArray[np.float32]) -> None:
    """Refuse an array that is not one-dimensional, little-endian float32.

    Raises:
        ValueError: it is not.
    """
    if array.dtype != np.dtype("<f4") or array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional float32. dtype={array.dtype}, shape={array.shape}")


def non_finite_error(values: NDArray[np.float32], layout: FragmentLayout, cut: Cut) -> NonFiniteError:
    """Return the error that names the first of a cut's `values` that its codec cannot carry."""
    limit = LARGEST_FLOAT32 if cut.codec is Codec.FLOAT32 else LARGEST_SCALED
    offset = int(np.argmin(np.abs(values) <= limit))
    index = layout.tensor_at(cut.first + offset)
    element = cut.first + offset - layout.offsets[index]
    return NonFiniteError(
        WireReason.NON_FINITE,
        f"value cannot be encoded. tensor={layout.tensors[index].name}, element={element}, value={values[offset]}",
    )
