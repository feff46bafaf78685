"""The inner loops of quantisation and of the outer step, compiled by numba when this module is imported.

Every element takes the operations of the NumPy code that a function names, in their order, each a float32 operation
with its own rounding: no fast-math, no fused multiply-add. So both write the same bits. Each loop works on a chunk that
stays in a core's first-level cache, and through a buffer, because a loop whose input and output may overlap is not
vectorised. All functions but the shortest release the GIL. numba keeps the machine code on disk, beside this file or,
where it can't be written, in the user's cache folder or NUMBA_CACHE_DIR; the key is the CPU and this file, so nothing
that is compiled may depend on another file of the project.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

Float32s = NDArray[np.float32]
Function = TypeVar("Function", bound=Callable[..., Any])

# What is done with each value that is decoded.
STORE, STORE_SCALED, ADD_SCALED, SUBTRACT, SUBTRACT_FROM = range(5)

_CHUNK: Final = 512  # elements in a buffer, at most 2 KiB; even
# Elements that a piece of a step has at least, in whole blocks: six arrays of them, 384 KiB, stay in a core's
# second-level cache. So a step takes 2.3 ns an element, and 3.1 in pieces of 2^18; 2^13 and 2^15 make no difference.
_PIECE: Final = np.uint64(2**14)
_LARGEST_BITS: Final = np.uint32(0x7F000000)  # of quantise.LARGEST_SCALED; NaN and infinity are above it
_MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
# Added to x, |x| < 2^22, leaves rint(x) in the low bits of the sum: two's complement in its lowest byte.
_MAGIC: Final = np.float32(1.5 * 2**23)
_INFINITY: Final = np.float32(np.inf)
_ZERO: Final = np.float32(0)
_ONE: Final = np.uint64(1)
_LOW_NIBBLE: Final = np.uint64(15)
_HIGH_NIBBLE: Final = np.uint64(240)
_SHIFT: Final = np.uint64(28)  # takes the code of a pair's second word to the high nibble of its first byte

_read_bytes = types.Array(types.uint8, 1, "C", readonly=True)
_read_floats = types.Array(types.float32, 1, "C", readonly=True)
_edges = types.Array(types.uint64, 1, "C", readonly=True)
_bytes, _floats, _words = types.uint8[::1], types.float32[::1], types.uint32[::1]
_float = types.float32


def _compiled(signature: Any, **more: Any) -> Callable[[Function], Function]:
    """Returns a decorator that compiles at once, or loads what an earlier process has compiled."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": False, **more}

    def decorate(function: Function) -> Function:
        try:
            compiled: Any = numba.njit(signature, cache=True, **options)(function)
        except RuntimeError:  # there is no folder to keep it in
            compiled = numba.njit(signature, **options)(function)
        return cast("Function", compiled)

    return decorate


def _compiled_on_use(function: Function) -> Function:
    """Compiles a function into those that call it."""
    compiled: Any = numba.njit(nogil=True, error_model="numpy")(function)
    return cast("Function", compiled)


@_compiled(types.boolean(types.int64, _float, _float, _read_floats, _edges, _floats, _bytes, _floats, types.boolean))
def quantise(  # noqa: C901, PLR0912 - loops in functions of their own are not vectorised, and take twice the time
    bits: int,  # 8 or 4
    top_code: np.float32,
    smallest_scale: np.float32,
    values: Float32s,  # (numel,)
    edges: NDArray[np.uint64],  # (count + 1,) where blocks begin, and numel
    scales: Float32s,  # (count,) written
    codes: NDArray[np.uint8],  # written
    decoded: Float32s,  # (numel,) written where `is_decoded`; may be `values`
    is_decoded: bool,
) -> bool:
    """`quantise.quantise`, and `dequantise` of the same; False at the first block that holds a value beyond the codec.

    Blocks before that one are decoded, to values within the codec.
    """
    buffer = np.empty(_CHUNK, np.float32)
    words, pairs, value_bits = buffer.view(np.uint32), buffer.view(np.uint64), values.view(np.uint32)
    for block in range(np.uint64(len(scales))):
        first, stop = edges[block], edges[block + _ONE]
        largest = np.uint32(0)
        for i in range(stop - first):
            largest = max(largest, np.uint32(value_bits[first + i] & _MAGNITUDE))
        if largest > _LARGEST_BITS:
            return False
        scale = np.uint32(largest).view(np.float32) / top_code
        divisor = scale
        if scale < smallest_scale:
            scale, divisor = _ZERO, _INFINITY
        scales[block] = scale
        element = first
        while element < stop:
            # One element where a block begins in the middle of a byte.
            n = _ONE if bits < 8 and element & _ONE else min(np.uint64(_CHUNK), stop - element)
            for i in range(n):
                buffer[i] = values[element + i] / divisor + _MAGIC
            if is_decoded:
                for i in range(n):
                    decoded[element + i] = (buffer[i] - _MAGIC) * scale
            if bits == 8:
                for i in range(n):
                    codes[element + i] = np.uint8(words[i])
            elif element & _ONE:
                codes[element >> _ONE] |= np.uint8((words[0] & 15) << 4)
            else:
                byte = element >> _ONE
                for j in range(n >> _ONE):
                    codes[byte + j] = np.uint8((pairs[j] & _LOW_NIBBLE) | ((pairs[j] >> _SHIFT) & _HIGH_NIBBLE))
                if n & _ONE:
                    codes[byte + (n >> _ONE)] = np.uint8(words[n - _ONE] & 15)
            element += n
    return True


@_compiled(types.void(types.int64, types.int64, _read_bytes, _edges, _read_floats, _read_floats, _read_floats, _floats))
def decode(  # noqa: C901, PLR0912 - as `quantise`
    bits: int,
    use: int,  # STORE, STORE_SCALED, ADD_SCALED, SUBTRACT or SUBTRACT_FROM
    codes: NDArray[np.uint8],
    edges: NDArray[np.uint64],  # (count + 1,)
    scales: Float32s,  # (count,) checked
    coefficients: Float32s,  # (count,) of each block's tensor; for the uses that are scaled
    source: Float32s,  # (numel,) for SUBTRACT_FROM, and not `out`, or nothing is vectorised
    out: Float32s,  # (numel,) written
) -> None:
    """`dequantise`, and what `step` does with each value: v, c v, out + c v, out - v or source - v."""
    levels = np.empty(_CHUNK, np.int8)
    pairs = levels.view(np.uint16)
    for block in range(np.uint64(len(scales))):
        element, stop, scale, coefficient = edges[block], edges[block + _ONE], scales[block], coefficients[block]
        while element < stop:
            n = _ONE if bits < 8 and element & _ONE else min(np.uint64(_CHUNK), stop - element)
            byte = element >> _ONE
            if bits == 8:
                for i in range(n):
                    levels[i] = np.int8(codes[element + i])
            else:
                for j in range((n + _ONE) >> _ONE):
                    pair = np.uint16(codes[byte + j] >> 4 if element & _ONE else codes[byte + j])
                    pair = (pair | (pair << np.uint16(4))) & np.uint16(0x0F0F)
                    # To signed bytes: of each, (nibble ^ 8) - 8, with a bit that keeps borrows apart.
                    pairs[j] = ((pair ^ np.uint16(0x8888)) - np.uint16(0x0808)) ^ np.uint16(0x8080)
            if use == STORE:
                for i in range(n):
                    out[element + i] = np.float32(levels[i]) * scale
            elif use == SUBTRACT:
                for i in range(n):
                    out[element + i] = out[element + i] - np.float32(levels[i]) * scale
            elif use == SUBTRACT_FROM:
                for i in range(n):
                    out[element + i] = source[element + i] - np.float32(levels[i]) * scale
            elif use == STORE_SCALED:
                for i in range(n):
                    out[element + i] = np.float32(levels[i]) * scale * coefficient
            else:
                for i in range(n):
                    out[element + i] = out[element + i] + np.float32(levels[i]) * scale * coefficient
            element += n


@_compiled_on_use
def _square(code: int) -> np.uint32:
    """The square of a 4-bit code's level."""
    level = np.int32(code ^ 8) - np.int32(8)
    return np.uint32(level * level)


@_compiled(types.float64(types.int64, _read_bytes, _edges, _read_floats))
def squared_norm(
    bits: int,
    codes: NDArray[np.uint8],
    edges: NDArray[np.uint64],  # (count + 1,) blocks of one tensor; the codes are those of their range's whole frame
    scales: Float32s,  # (count,) checked
) -> float:
    """The sum of the squares of what `decode` would store, before each is rounded to float32."""
    norm, squares = 0.0, np.empty(_CHUNK, np.uint8)
    for block in range(np.uint64(len(scales))):
        first, stop = edges[block], edges[block + _ONE]
        total = np.uint32(0)  # at most 2^16 squares of at most 2^14
        if bits == 8:
            for i in range(stop - first):
                level = np.int32(np.int8(codes[first + i]))
                total += np.uint32(level * level)
        else:
            if first & _ONE:
                total += _square(codes[first >> _ONE] >> 4)
                first += _ONE
            byte, end = first >> _ONE, stop >> _ONE
            while byte < end:
                chunk = codes[byte : min(byte + np.uint64(_CHUNK), end)]
                for i in range(len(chunk)):  # at most 2 * 64, in bytes, of which a vector holds four times as many
                    squares[i] = np.uint8(_square(chunk[i] & 15) + _square(chunk[i] >> 4))
                for i in range(len(chunk)):
                    total += np.uint32(squares[i])
                byte += np.uint64(len(chunk))
            if stop > first and stop & _ONE:
                total += _square(codes[stop >> _ONE] & 15)
        scale = np.float64(scales[block])
        norm += np.float64(total) * (scale * scale)
    return norm


@_compiled(types.float64(_read_floats), fastmath={"reassoc"})
def square_sum(values: Float32s) -> float:
    """The sum of squares in float64, in whatever order is fastest: its last bits depend on the machine."""
    total = 0.0
    for i in range(np.uint64(len(values))):
        value = np.float64(values[i])
        total += value * value
    return total


@_compiled(types.void(_read_floats, _read_floats, _read_floats, _floats))
def shift(anchor: Float32s, base: Float32s, in_flight: Float32s, out: Float32s) -> None:
    """Writes anchor - base + in_flight."""
    for i in range(np.uint64(len(out))):
        out[i] = (anchor[i] - base[i]) + in_flight[i]


@_compiled_on_use
def step_target(
    acc: Float32s,  # (numel,)
    edges: NDArray[np.uint64],  # (tensors + 1,) from 0 to numel
    scales: Float32s,  # (tensors,)
    momentum: Float32s,  # (numel,) written
    residual: Float32s,  # (numel,)
    decay: np.float32,
    gain: np.float32,
    mu: np.float32,
    rate: np.float32,
    first: np.uint64,  # elements [first, stop) are written
    stop: np.uint64,
    target: Float32s,  # (numel,) written
) -> None:
    """`step._write_target` of a range."""
    for tensor in range(np.uint64(len(scales))):
        low, scale = max(first, edges[tensor]), scales[tensor]
        for i in range(max(low, min(stop, edges[tensor + _ONE])) - low):
            d = acc[low + i] * scale
            buf = momentum[low + i] * decay + d * gain
            momentum[low + i] = buf
            target[low + i] = residual[low + i] + (d + buf * mu) * rate


@_compiled_on_use
def advance(target: Float32s, q: Float32s, weights: Float32s, residual: Float32s) -> None:
    """Writes weights - q and target - q."""
    for i in range(np.uint64(len(target))):
        weights[i], residual[i] = weights[i] - q[i], target[i] - q[i]


@_compiled(
    types.boolean(
        *(types.int64, _float, _float, _edges, _floats, _bytes),
        *(_read_floats, _edges, _read_floats, _floats, _floats, _float, _float, _float, _float),
        *(_floats, _floats, _floats),
    )
)
def take_step(
    bits: int,  # these six are those of `quantise`
    top_code: np.float32,
    smallest_scale: np.float32,
    edges: NDArray[np.uint64],
    scales: Float32s,
    codes: NDArray[np.uint8],
    acc: Float32s,  # (numel,); what follows is of `step_target` and `advance`
    tensor_edges: NDArray[np.uint64],
    tensor_scales: Float32s,
    momentum: Float32s,  # (numel,) written
    residual: Float32s,  # (numel,) written
    decay: np.float32,
    gain: np.float32,
    mu: np.float32,
    rate: np.float32,
    weights: Float32s,  # (numel,) written
    target: Float32s,  # (numel,) written
    q: Float32s,  # (numel,) written
) -> bool:
    """`step_target`, `quantise` and `advance` in turns, so that each finds in a cache what the one before has written.

    Returns False, and stops, at the piece in which `quantise` finds a value beyond the codec. Its momentum and target
    are written, its weights and residual are not, and `target` is of an earlier call beyond it.
    """
    block, count = np.uint64(0), np.uint64(len(scales))
    while block < count:
        end = block + _ONE
        while end < count and edges[end] - edges[block] < _PIECE:
            end += _ONE
        first, stop = edges[block], edges[end]
        factors = (decay, gain, mu, rate)
        step_target(acc, tensor_edges, tensor_scales, momentum, residual, *factors, first, stop, target)
        limits = (bits, top_code, smallest_scale)
        if not quantise(*limits, target, edges[block : end + _ONE], scales[block:end], codes, q, True):
            return False
        advance(target[first:stop], q[first:stop], weights[first:stop], residual[first:stop])
        block = end
    return True
