"""The arithmetic of one version, exact to the bit on every machine, over arrays and element ranges.

With v_m the delta of member m as decoded, t the tensor of an element, and the scalars that the commit names
(c, scale, decay, gain, mu, rate; float32):

    acc      = c[0,t] v_0 ;  acc = acc + c[m,t] v_m          members in the close's order
    d        = scale[t] acc                                  the outer gradient
    buf      = decay buf + gain d                            momentum
    target   = residual + rate (d + mu buf)                  Nesterov's step, and what was dropped before
    q        = decode(encode(target))                        the update, as every learner decodes it
    theta    = theta - q
    residual = target - q

Each operation is one float32 operation with its own rounding, elementwise: no fused multiply-add, no reduction. So
neither the cut into ranges nor the number of threads changes a bit. All functions release the GIL in NumPy, long
kernels, zstd and hashes; calls on disjoint ranges may overlap.

Source: Decoupled DiLoCo (arXiv 2604.21428), outer optimizer; quantised updates with residual are this project's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from skerry.wire.codecs import MAX_FRAME_NUMEL, Cut, Encoding, PerThread, cut_frames
from skerry.wire.frames import Frame, decode_frame, open_frame, pack_frame, parse_frames, quantise_cut
from skerry.wire.kernels import kernels_for
from skerry.wire.layout import FragmentLayout, blocks_of
from skerry.wire.quantise import decode_in_kernels, empty_frame, kernel_limits, non_finite_error

Float32s = NDArray[np.float32]

SPAN_NUMEL: Final = 2**20
# A version whose state was being written when something failed. No version has this number.
TORN: Final = -2


@dataclass
class OuterState:
    """What the syncer keeps of one fragment at one version; arrays are written in place and may be memory-mapped."""

    weights: Float32s  # (numel,)
    momentum: Float32s  # (numel,)
    residual: Float32s  # (numel,)
    version: int  # TORN while it is being written, and after a write that failed


@dataclass(frozen=True)
class Scalars:
    """What one merge multiplies by; a commit names every one of them, so that a replay is exact."""

    rate: np.float32
    momentum: np.float32
    tensor_scales: Float32s  # (tensors,)
    coefficients: Float32s  # (members, tensors)
    decay: np.float32
    gain: np.float32


@dataclass(frozen=True)
class Step:
    """Everything that the arithmetic of one version works on."""

    layout: FragmentLayout
    scalars: Scalars
    encoding: Encoding
    state: OuterState  # of the version before
    acc: Float32s  # (numel,) the members' weighted sum


class Span(NamedTuple):
    """Elements `[first, stop)` of a fragment."""

    first: int
    stop: int


class AdvancedSpan(NamedTuple):
    """What taking one span of a state to its next version has come to."""

    span: Span
    frames: tuple[bytes, ...]  # its update; none where they were not asked for


def step_spans(layout: FragmentLayout, encoding: Encoding) -> list[Span]:
    """Returns spans of about 2^20 elements, cut where blocks begin."""
    block = encoding.block if encoding.codec.has_blocks else 1
    edges = [layout.boundary_at_or_before(first, block) for first in range(0, layout.numel, SPAN_NUMEL)]
    edges.append(layout.numel)
    return [Span(first, stop) for first, stop in pairwise(edges)]


def accumulate(
    acc: Float32s,  # (numel,) written where the frames are
    frames: Iterable[Frame],
    layout: FragmentLayout,
    coefficients: Float32s,  # (tensors,) of this member
    *,
    is_first: bool,
) -> None:
    """Adds one member's frames: acc + c v, or c v for the first member.

    Raises:
        FrameError: the frames can't be trusted; `acc` is then of no use.
    """
    use = _Use.STORE_SCALED if is_first else _Use.ADD_SCALED
    for frame in frames:
        _use_frame(frame, layout, acc[frame.first : frame.first + frame.numel], use, coefficients=coefficients)


def advance_span(step: Step, span: Span, *, packs: bool = True) -> AdvancedSpan:
    """Writes one span of the state's next version, and returns its update if it `packs` that.

    Raises:
        NonFiniteError: the step left the range of the codec; the state is then of no use.
    """
    frames = list[bytes]()
    for cut in cut_frames(step.layout, step.encoding, span.first, span.stop - span.first):
        raw = _advance(step, cut)
        if packs:
            frames.append(pack_frame(cut, raw, step.encoding))
    return AdvancedSpan(span, tuple(frames))


def subtract_update(
    weights: Float32s,  # (numel,) written where the frames are
    data: bytes | memoryview,
    layout: FragmentLayout,
    *,
    source: Float32s | None = None,  # (numel,) of the version before; None: `weights`
) -> None:
    """Writes weights that are a version further where the frames of its update are.

    Raises:
        FrameError: the frames can't be trusted; `weights` are then of no use.
    """
    for frame in parse_frames(data):
        inside = slice(frame.first, frame.first + frame.numel)
        if source is None:
            _use_frame(frame, layout, weights[inside], _Use.SUBTRACT)
        else:
            _use_frame(frame, layout, weights[inside], _Use.SUBTRACT_FROM, source=source[inside])


class _Use(Enum):
    """What becomes of each decoded value v, with c its tensor's coefficient; the names are those of the kernels."""

    STORE_SCALED = "c v"
    ADD_SCALED = "out + c v"
    SUBTRACT = "out - v"
    SUBTRACT_FROM = "source - v"


def _use_frame(
    frame: Frame,
    layout: FragmentLayout,
    out: Float32s,  # (frame.numel,) written
    use: _Use,
    *,
    coefficients: Float32s | None = None,  # (tensors,) where `use` has c
    source: Float32s | None = None,  # (frame.numel,) where `use` has it
) -> None:
    ranges = list(layout.ranges(frame.first, frame.numel))
    kernels = kernels_for(out) if frame.block else None
    if kernels is None:
        values = decode_frame(frame, layout, out if use is _Use.STORE_SCALED else None)
        if coefficients is not None:
            for index, start, stop in ranges:
                part = values[start - frame.first : stop - frame.first]
                np.multiply(part, coefficients[index], out=part)
        if use is not _Use.STORE_SCALED:
            (np.add if use is _Use.ADD_SCALED else np.subtract)(out if source is None else source, values, out=out)
        return
    blocks, raw = open_frame(frame, layout, out)
    assert blocks is not None  # `frame.block` is the size of each
    if coefficients is not None:
        block_counts = [-(-(stop - start) // frame.block) for _, start, stop in ranges]
        coefficients = np.repeat(coefficients.take([index for index, _, _ in ranges]), block_counts)
    code = getattr(kernels, use.name)
    decode_in_kernels(kernels, frame.codec, raw, blocks, out, use=code, coefficients=coefficients, source=source)


_arrays: Final = PerThread(lambda: np.empty((2, MAX_FRAME_NUMEL), np.float32))


def _advance(step: Step, cut: Cut) -> NDArray[np.uint8]:
    """Writes the next version of a cut's elements, and returns the raw bytes of its update."""
    layout, (target, q) = step.layout, _arrays.value[:, : cut.numel]
    inside = slice(cut.first, cut.first + cut.numel)
    of_fragment = step.state.weights, step.state.momentum, step.state.residual
    acc, weights, momentum, residual = (array[inside] for array in (step.acc, *of_fragment))
    kernels = kernels_for(acc, weights, momentum, residual)
    if kernels is None or not cut.block:
        _write_target(step, cut, momentum, residual, target=target, d=q)
        raw = quantise_cut(target, layout, cut, decoded=q)
        np.subtract(weights, q, out=weights)
        np.subtract(target, q, out=residual)
        return raw
    scalars = step.scalars
    tensors = slice(layout.tensor_at(inside.start), layout.tensor_at(inside.stop - 1) + 1)
    edges = (layout.bounds_within(inside.start, inside.stop) - cut.first).astype(np.uint64)
    sums = (acc, edges, scalars.tensor_scales[tensors], momentum, residual)
    factors = (scalars.decay, scalars.gain, scalars.momentum, scalars.rate)
    blocks = blocks_of(layout, cut.first, cut.numel, cut.block)
    raw, scales, codes = empty_frame(cut.codec, blocks)
    of_codec, written_arrays = (*kernel_limits(cut.codec), blocks.edges, scales, codes), (weights, target, q)
    if not kernels.take_step(*of_codec, *sums, *factors, *written_arrays):
        raise non_finite_error(target, layout, cut)
    return raw


# The encoder refuses values that overflow and names the element, so NumPy's warning would only repeat it.
@np.errstate(over="ignore", invalid="ignore")
def _write_target(
    step: Step, cut: Cut, momentum: Float32s, residual: Float32s, *, target: Float32s, d: Float32s
) -> None:
    """Writes `target`, the new momentum and `d`, `(cut.numel,)` each."""
    scalars = step.scalars
    for index, start, stop in step.layout.ranges(cut.first, cut.numel):
        np.multiply(step.acc[start:stop], scalars.tensor_scales[index], out=d[start - cut.first : stop - cut.first])
    np.multiply(momentum, scalars.decay, out=momentum)
    np.multiply(d, scalars.gain, out=target)
    np.add(momentum, target, out=momentum)
    np.multiply(momentum, scalars.momentum, out=target)
    np.add(d, target, out=target)
    np.multiply(target, scalars.rate, out=target)
    np.add(residual, target, out=target)
