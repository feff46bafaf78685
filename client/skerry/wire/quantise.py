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

from skerry.wire.codecs import MAX_FRAME_NUMEL, Codec, Cut
from skerry.wire.errors import FrameError, NonFiniteError, WireReason
from skerry.wire.kernels import kernels_for
from skerry.wire.layout import Blocks, FragmentLayout

LARGEST_FLOAT32: Final = np.finfo(np.float32).max
LARGEST_SCALED: Final = np.float32(2.0**127)
"""Largest magnitude that all codecs but float32 carry, so that no code times its scale, and no rounding, overflows."""
SMALLEST_SCALE: Final = {
    Codec.INT8: np.float32(2.0**-125),
    Codec.INT4: np.float32(2.0**-125),
    Codec.E3M0: np.float32(2.0**-119),
}
"""Blocks whose scale would be smaller are written as zeros. From here on a subnormal element is below half a step."""
ROUND_TO_INTEGER: Final = np.float32(1.5 * 2**23)
"""Added to x, |x| < 2^22, leaves rint(x) in the low bits of the sum: two's complement in its lowest byte."""
_ONE: Final = np.uint32(1)
_SQUARED_NUMEL: Final = 2**16
"""Elements squared at a time: half a megabyte of float64 that stays in cache, however large the fragment."""
_KERNEL_BITS: Final = {Codec.INT8: 8, Codec.INT4: 4, Codec.E3M0: 3}

_CODE = np.arange(16)
NIBBLE_VALUES: Final = {
    Codec.INT4: np.where(_CODE < 8, _CODE, _CODE - 16).astype(np.float32),
    Codec.E3M0: np.where(_CODE & 7, np.where(_CODE < 8, 1, -1) * 2.0 ** ((_CODE & 7) - 7), 0).astype(np.float32),
}
_BYTE = np.arange(256)
# (256,) complex64: the two float32 values of each byte side by side, so that one lookup decodes two codes.
_PAIR_OF_BYTE: Final = {
    codec: np.stack([values[_BYTE & 15], values[_BYTE >> 4]], axis=1).view(np.complex64).ravel()
    for codec, values in NIBBLE_VALUES.items()
}


def _e3m0_codes() -> NDArray[np.uint8]:
    """Return the code of each value of a float32's top ten bits: sign, exponent and the first of the mantissa.

    For |x| <= 1 these bits are enough: the nearest power of two changes at 1.5 times the lower one, and 0 changes to
    2^-6 at 2^-7 (top bits 240). Ties go to the larger magnitude; there is no negative zero.
    """
    top_bits = np.arange(1024)
    magnitude = top_bits & 511
    exponent = np.where(magnitude == 240, 1, np.clip((magnitude - 239) >> 1, 0, 7))
    sign = np.where(exponent > 0, top_bits >> 9, 0)
    return (sign << 3 | exponent).astype(np.uint8)


E3M0_CODE_OF_TOP_BITS: Final = _e3m0_codes()


class Quantiser:
    """Writes frames' raw bytes; owns scratch for one frame, so it is for one thread at a time."""

    def __init__(self) -> None:
        """Allocate about 3 MB."""
        self._floats = np.empty(MAX_FRAME_NUMEL, np.float32)
        self._bytes = np.empty(MAX_FRAME_NUMEL + 1, np.uint8)
        self._raw = np.empty(5 * MAX_FRAME_NUMEL, np.uint8)

    def quantise(
        self,
        codec: Codec,
        values: NDArray[np.float32],  # (numel,) contiguous
        blocks: Blocks | None,  # of exactly these values; None where the codec has none
        decoded: NDArray[np.float32] | None = None,  # (numel,) contiguous, written; may be `values`
    ) -> NDArray[np.uint8] | None:
        """Return a view of the raw bytes, valid until the next call; None when a value is beyond the codec.

        `decoded`, when given, is overwritten with what a receiver will decode. When a value is beyond the codec, only
        elements before it are, with values that the codec carries.
        """
        if blocks is None:
            raw = _elements(codec, values)
        else:
            raw, scales, codes = self.empty(codec, blocks)
            out = values if decoded is None else decoded
            kernels = kernels_for(values, out)
            if kernels is not None:
                arrays = (values, blocks.edges, scales, codes, out)
                is_within = kernels.quantise(*kernel_limits(codec), *arrays, decoded is not None)
                return raw if is_within else None
            if not self._quantise(codec, values, blocks, scales, codes):
                return None
        if decoded is not None and raw is not None:
            dequantise(codec, raw, blocks, decoded)
        return raw

    def empty(self, codec: Codec, blocks: Blocks) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.uint8]]:
        """Return memory for a frame's raw bytes, until the next call, and views of its scales and its codes."""
        raw = self._raw[: codec.raw_size(blocks.numel, blocks.count)]
        return raw, raw[: 4 * blocks.count].view(np.float32), raw[4 * blocks.count :]

    def _quantise(
        self,
        codec: Codec,
        values: NDArray[np.float32],
        blocks: Blocks,
        scales: NDArray[np.float32],  # (count,) written
        codes: NDArray[np.uint8],  # written
    ) -> bool:
        """Write scales and codes in NumPy; False when a value is beyond the codec."""
        quotients = self._floats[: blocks.numel]
        if not self._scale(codec, values, blocks, scales, quotients):
            return False
        if codec is Codec.E3M0:
            _pack_nibbles(self._exponent_codes(quotients), codes)
        else:
            np.add(quotients, ROUND_TO_INTEGER, out=quotients)
            if codec is Codec.INT8:
                np.copyto(codes, quotients.view(np.uint32), casting="unsafe")
            else:
                nibbles = self._bytes[: blocks.numel + blocks.numel % 2]
                np.copyto(nibbles[: blocks.numel], quotients.view(np.uint32), casting="unsafe")
                nibbles[blocks.numel :] = 0
                nibbles &= np.uint8(15)
                _pack_nibbles(nibbles, codes)
        return True

    def _scale(
        self,
        codec: Codec,
        values: NDArray[np.float32],
        blocks: Blocks,
        scales: NDArray[np.float32],  # (count,) written
        quotients: NDArray[np.float32],  # (numel,) written: values over their scale
    ) -> bool:
        """Find each block's scale and divide by it; False when a value is not finite or too large."""
        np.abs(values, out=quotients)
        _block_maxima(quotients, blocks, scales)
        if not scales.max() <= LARGEST_SCALED:  # NaN compares false
            return False
        if codec.top_code != 1:
            np.divide(scales, np.float32(codec.top_code), out=scales)
        is_zero = scales < SMALLEST_SCALE[codec]
        scales[is_zero] = 0
        divisors = np.where(is_zero, np.float32(np.inf), scales)
        _each_block(np.divide, values, divisors, blocks, quotients)
        return True

    def _exponent_codes(self, quotients: NDArray[np.float32]) -> NDArray[np.uint8]:
        """Return e3m0 codes of |quotient| <= 1, one a byte, padded with a zero to an even count."""
        numel = len(quotients)
        codes = self._bytes[: numel + numel % 2]
        codes[numel:] = 0
        bits = quotients.view(np.uint32)
        np.right_shift(bits, 22, out=bits)
        np.take(E3M0_CODE_OF_TOP_BITS, bits, out=codes[:numel], mode="clip")
        return codes


def kernel_limits(codec: Codec) -> tuple[int, np.float32, np.float32]:
    """Return what kernels have to know of a codec with blocks: bits, largest code and smallest scale."""
    return _KERNEL_BITS[codec], np.float32(codec.top_code), SMALLEST_SCALE[codec]


def _elements(codec: Codec, values: NDArray[np.float32]) -> NDArray[np.uint8] | None:
    """Return the raw bytes of a codec without blocks; None when a value is beyond it."""
    limit = LARGEST_FLOAT32 if codec is Codec.FLOAT32 else LARGEST_SCALED
    if not (values.max() <= limit and values.min() >= -limit):  # NaN compares false
        return None
    return values.view(np.uint8) if codec is Codec.FLOAT32 else to_bfloat16(values).view(np.uint8)


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the values' bits as bfloat16, rounded to nearest, ties to even."""
    bits = values.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    return rounded.view(np.uint16)[1::2].copy()


def _block_maxima(magnitudes: NDArray[np.float32], blocks: Blocks, out: NDArray[np.float32]) -> None:
    """Write each block's largest magnitude; NaN where it holds one."""
    if blocks.starts is not None:
        np.maximum.reduceat(magnitudes, blocks.starts, out=out)
        return
    full = blocks.full_count
    # As integers, which order as the magnitudes do (NaN on top) and which NumPy reduces three times as fast.
    body = magnitudes[: full * blocks.size].view(np.int32).reshape(full, blocks.size)
    np.max(body, axis=1, out=out[:full].view(np.int32))
    if full < blocks.count:
        out[full] = magnitudes[full * blocks.size :].max()


def _each_block(
    operation: np.ufunc,
    values: NDArray[np.float32],
    per_block: NDArray[np.float32],  # (count,)
    blocks: Blocks,
    out: NDArray[np.float32],
) -> None:
    """Combine each element with its block's number."""
    if blocks.starts is not None:
        operation(values, np.repeat(per_block, blocks.lengths), out=out)
        return
    full = blocks.full_count
    body, shape = full * blocks.size, (full, blocks.size)
    operation(values[:body].reshape(shape), per_block[:full, None], out=out[:body].reshape(shape))
    if full < blocks.count:
        operation(values[body:], per_block[full], out=out[body:])


def _pack_nibbles(nibbles: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    """Write two 4-bit codes a byte, low nibble first. `nibbles` has an even count and is spoilt."""
    pairs = nibbles.view(np.uint16)
    pairs |= pairs >> 4
    np.copyto(out, pairs, casting="unsafe")


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
        _decode_elements(codec, raw, out)
        return
    kernels = kernels_for(out)
    if kernels is not None:
        decode_in_kernels(kernels, codec, raw, blocks, out, use=kernels.STORE)
        return
    scales, codes = _checked(codec, raw, blocks)
    if codec is Codec.INT8:
        np.copyto(out, codes.view(np.int8))
    else:
        pair_of_byte = _PAIR_OF_BYTE[codec]
        whole = blocks.numel // 2
        np.take(pair_of_byte, codes[:whole], out=out[: 2 * whole].view(np.complex64), mode="clip")
        if blocks.numel % 2:
            out[-1] = pair_of_byte[codes[-1]].real
    _each_block(np.multiply, out, scales, blocks, out)


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
    kernels.decode(_KERNEL_BITS[codec], use, codes, blocks.edges, scales, *optional, out)


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
        norms[index] += kernels.squared_norm(_KERNEL_BITS[codec], codes, edges[low : high + 1], scales[low:high])
        low = high
    return norms


def _kernels_for_norms(values: NDArray[np.float32]) -> ModuleType | None:
    """Returns the kernels for large ranges; in small ones, as simulations have, bits don't depend on what is loaded."""
    return kernels_for(values) if len(values) >= _SQUARED_NUMEL else None


def _checked(codec: Codec, raw: NDArray[np.uint8], blocks: Blocks) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Return the scales, which are in order, and the codes."""
    scales = raw[: 4 * blocks.count].view(np.float32)
    if not scales.flags.aligned:  # as in a frame that was not compressed
        scales = scales.copy()
    _check_scales(codec, scales)
    return scales, raw[4 * blocks.count :]


def _decode_elements(codec: Codec, raw: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
    if codec is Codec.FLOAT32:
        np.copyto(out, raw.view(np.float32))
    else:
        bits = out.view(np.uint32)
        np.copyto(bits, raw.view(np.uint16))
        bits <<= np.uint32(16)
    if not (out.max() <= LARGEST_FLOAT32 and out.min() >= -LARGEST_FLOAT32):
        raise FrameError(WireReason.NON_FINITE, f"an element is not finite. codec={codec}")


def _check_scales(codec: Codec, scales: NDArray[np.float32]) -> None:
    """Refuse scales that would decode to what is not finite, or that machines do not agree on."""
    smallest, largest = SMALLEST_SCALE[codec], LARGEST_SCALED / np.float32(codec.top_code)
    kernels = kernels_for(scales)
    if kernels is not None:
        is_right = kernels.are_scales(scales, smallest, largest)
    else:
        bits = scales.view(np.uint32)
        # Positive numbers order as their bits do; one less makes zero the largest of all.
        is_right = bits.max() <= largest.view(np.uint32) and (bits - _ONE).min() >= smallest.view(np.uint32) - _ONE
    if is_right:
        return
    reason = WireReason.BAD_SCALE if np.isfinite(scales).all() else WireReason.NON_FINITE
    raise FrameError(reason, f"a block's scale is not finite or out of range. codec={codec}")


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
    at = int(np.argmin(np.abs(values) <= limit))
    index = layout.tensor_at(cut.first + at)
    return NonFiniteError(
        tensor=layout.tensors[index].name, element=cut.first + at - layout.offsets[index], value=float(values[at])
    )
