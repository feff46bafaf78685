"""Cuts a range into frames. Every encoder of this project cuts alike, so that frames are equal byte for byte."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from skerry.wire.codecs import Codec, Encoding
    from skerry.wire.layout import FragmentLayout

MAX_FRAME_NUMEL: Final = 2**18
"""A frame's float32 input is at most 1 MiB: it stays in a core's cache, and a receiver can allocate it unchecked."""


class Cut(NamedTuple):
    """One frame's range, all of it in one codec; `block` is 0 where the codec has none."""

    codec: Codec
    block: int
    first: int
    numel: int


def cut_frames(layout: FragmentLayout, encoding: Encoding, first: int, numel: int) -> Iterator[Cut]:
    """Yield the frames that cover the range, each as full as codec changes and block boundaries allow.

    Raises:
        ValueError: (at once) the range is not inside the fragment, or not cut at block boundaries.
    """
    stop = first + numel
    if first < 0 or numel < 0 or stop > layout.numel:
        msg = f"range outside the fragment. first={first}, numel={numel}, fragment_numel={layout.numel}"
        raise ValueError(msg)
    for edge in (first, stop):
        if edge < layout.numel:
            tensor = layout.tensors[layout.tensor_at(edge)]
            if encoding.codec_for(tensor).has_blocks and not layout.is_boundary(edge, encoding.block):
                msg = f"range not cut at a block boundary. element={edge}, tensor={tensor.name}, block={encoding.block}"
                raise ValueError(msg)
    return _cut(layout, encoding, first, numel)


def _cut(layout: FragmentLayout, encoding: Encoding, first: int, numel: int) -> Iterator[Cut]:
    """Fill frames greedily, in element order."""
    codec: Codec | None = None
    start = filled = first  # the frame that is being filled covers [start, filled)
    for index, low, high in layout.ranges(first, numel):
        tensor_codec = encoding.codec_for(layout.tensors[index])
        if codec is not None and tensor_codec is not codec and filled > start:
            yield _whole(codec, encoding, start, filled)
            start = filled
        codec = tensor_codec
        grain = encoding.block if codec.has_blocks else 1
        at = low
        while high - start > MAX_FRAME_NUMEL:
            room = start + MAX_FRAME_NUMEL - at
            at += room - room % grain
            yield _whole(codec, encoding, start, at)
            start = at
        filled = high
    if codec is not None and filled > start:
        yield _whole(codec, encoding, start, filled)


def _whole(codec: Codec, encoding: Encoding, start: int, stop: int) -> Cut:
    return Cut(codec, encoding.block if codec.has_blocks else 0, start, stop - start)


def cut_parts(layout: FragmentLayout, encoding: Encoding, part_numel: int) -> Iterator[tuple[int, int]]:
    """Yield `(first, numel)` of parts that cover the fragment, each of at most `part_numel` elements.

    Raises:
        ValueError: a part could not hold one block.
    """
    if part_numel < encoding.block:
        msg = f"a part must hold a block. part_numel={part_numel}, block={encoding.block}"
        raise ValueError(msg)
    first = 0
    while first < layout.numel:
        stop = layout.boundary_at_or_before(first + part_numel, encoding.block)
        yield first, stop - first
        first = stop
