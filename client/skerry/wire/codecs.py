"""The formats in which a fragment's elements are sent and stored, how they are compressed and cut into frames.

Every encoder of this project cuts a fragment into frames alike, so that frames are equal byte for byte.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, Final, Generic, NamedTuple, TypeVar, get_type_hints

import msgspec
import numpy as np
import zstandard
from msgspec import Meta

from skerry.wire.errors import FrameError, WireReason
from skerry.wire.layout import FragmentLayout, TensorSpec, blocks_of

T = TypeVar("T")

HEADER_SIZE: Final = 32  # bytes of a frame's header
MAX_FRAME_NUMEL: Final = 2**18
"""A frame's float32 input is at most 1 MiB: it stays in a core's cache, and a receiver can allocate it unchecked."""
MAX_BLOCK: Final = 2**16 - 1
"""The block's length is a u16 in the frame header."""


class Codec(StrEnum):
    """How one element is written: as it is, or as a signed integer of `bits` bits times its block's scale."""

    FLOAT32 = "float32"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def number(self) -> int:
        """The codec's number in a frame header."""
        return _CODECS[self][0]

    @property
    def bits(self) -> int:
        """Bits an element, scales apart."""
        return _CODECS[self][1]

    @property
    def has_blocks(self) -> bool:
        """Whether elements are written as codes relative to their block's scale."""
        return self is not Codec.FLOAT32

    @property
    def top_code(self) -> int:
        """The scale is a block's largest magnitude divided by this; block codecs only."""
        return (1 << self.bits - 1) - 1

    def code_size(self, numel: int) -> int:
        """Bytes of `numel` codes or elements, scales apart."""
        return (numel * self.bits + 7) // 8

    def raw_size(self, numel: int, block_count: int) -> int:
        """Uncompressed bytes of a frame with `block_count` blocks (not looked at where the codec has none)."""
        return self.code_size(numel) + (4 * block_count if self.has_blocks else 0)


# Number in a frame header, and bits an element.
_CODECS: Final = {Codec.FLOAT32: (1, 32), Codec.INT8: (3, 8), Codec.INT4: (4, 4)}
CODEC_OF_NUMBER: Final = {codec.number: codec for codec in Codec}


class Compressor(StrEnum):
    """How a frame's bytes are compressed."""

    NONE = "none"
    ZSTD = "zstd"


COMPRESSORS: Final = (Compressor.NONE, Compressor.ZSTD)  # by their number in a frame header


class PerThread(threading.local, Generic[T]):
    """What each thread needs one of for itself, and what takes longer to make than a small frame."""

    def __init__(self, make: Callable[[], T]) -> None:
        self.value = make()


_decompressor: Final = PerThread(zstandard.ZstdDecompressor)
# Level 1: higher ones are only slower on codes.
_compressor: Final = PerThread(lambda: zstandard.ZstdCompressor(level=1, write_checksum=False, write_content_size=True))


def compress(raw: memoryview) -> bytes:
    """Return `raw` as one zstd frame that says its size."""
    return _compressor.value.compress(raw)


def decompress_exactly(payload: bytes | memoryview, size: int) -> bytes:
    """Return `payload` decompressed, which must come to `size` bytes; never allocates more than that.

    Raises:
        FrameError: BOMB when it declares or comes to another size; CORRUPT when it is not one whole zstd frame.
    """
    try:
        declared = zstandard.frame_content_size(payload)
    except zstandard.ZstdError as error:
        raise FrameError(WireReason.CORRUPT, "payload has no zstd frame header") from error
    if declared != size:
        # Checked first, because the library allocates what the payload declares.
        raise FrameError(WireReason.BOMB, f"payload declares another size. expected={size}, declared={declared}")
    try:
        raw = _decompressor.value.decompress(payload, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FrameError(WireReason.CORRUPT, "payload is not one whole zstd frame") from error
    if len(raw) != size:
        raise FrameError(WireReason.BOMB, f"payload came to another size. expected={size}, actual={len(raw)}")
    return raw


def check_fields(values: Any) -> None:
    """Checks every field of a frozen dataclass by its annotation, and takes over a word as the member of its enum.

    Raises:
        ValueError: a field is out of its range, or of another type; the message names it.
    """
    mirror = _mirror(values.__class__)
    given = {name: getattr(values, name) for name in mirror.__struct_fields__}
    plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in given.items()}
    try:
        checked = msgspec.convert(plain, mirror)
    except msgspec.ValidationError as error:
        raise ValueError(f"{mirror.__name__} has a value that is not legal. because={error}") from error
    vars(values).update(msgspec.structs.asdict(checked))


@cache
def _mirror(dataclass_type: type) -> type[msgspec.Struct]:
    """Returns a struct with the fields of a dataclass, since msgspec remembers how to check that."""
    return msgspec.defstruct(dataclass_type.__name__, get_type_hints(dataclass_type, include_extras=True).items())


@dataclass(frozen=True)
class Encoding:
    """What a sender chooses. A receiver needs none of it, because every frame says how it was written.

    Raises:
        ValueError: a field is out of its range.
    """

    codec: Codec
    block: Annotated[int, Meta(ge=1, le=MAX_BLOCK)] = 256
    """Elements that share a scale, 1 to 65535. 256 costs an eighth of a bit an element."""
    vector_codec: Codec = Codec.FLOAT32
    """For tensors of at most one dimension, whose few elements matter most. Ignored where `codec` has no blocks."""
    compressor: Compressor = Compressor.ZSTD

    def __post_init__(self) -> None:
        """Refuse what no frame header can hold."""
        check_fields(self)

    def codec_for(self, tensor: TensorSpec) -> Codec:
        """Return the codec that this tensor's elements take."""
        return self.vector_codec if tensor.is_vector and self.codec.has_blocks else self.codec


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
        raise ValueError(f"range outside the fragment. first={first}, numel={numel}, fragment_numel={layout.numel}")
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
        edge = low
        while high - start > MAX_FRAME_NUMEL:
            room = start + MAX_FRAME_NUMEL - edge
            edge += room - room % grain
            yield _whole(codec, encoding, start, edge)
            start = edge
        filled = high
    if codec is not None and filled > start:
        yield _whole(codec, encoding, start, filled)


def _whole(codec: Codec, encoding: Encoding, start: int, stop: int) -> Cut:
    return Cut(codec, encoding.block if codec.has_blocks else 0, start, stop - start)


def cut_parts(layout: FragmentLayout, encoding: Encoding, part_size_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield `(first, numel)` of parts that cover the fragment, nearly as large as surely fit `part_size_bytes`.

    A part holds one block at least, whatever its size.
    """
    first = 0
    while first < layout.numel:
        stop = _last_fitting(layout, encoding, first, part_size_bytes)
        yield first, stop - first
        first = stop


def _last_fitting(layout: FragmentLayout, encoding: Encoding, first: int, size_bytes: int) -> int:
    """Return where a part from `first` on ends, if nothing compresses."""
    block = encoding.block if encoding.codec.has_blocks else 1
    numel = 8 * size_bytes // encoding.codec.bits
    while (stop := layout.boundary_at_or_before(first + numel, block)) > first:
        actual_bytes = sum(_frame_bytes(layout, cut) for cut in cut_frames(layout, encoding, first, stop - first))
        if actual_bytes <= size_bytes:
            return stop
        numel = (stop - first) * size_bytes // actual_bytes
    _, _, stop = next(layout.ranges(first, block))
    return stop


def _frame_bytes(layout: FragmentLayout, cut: Cut) -> int:
    block_count = blocks_of(layout, cut.first, cut.numel, cut.block).count if cut.block else 0
    return HEADER_SIZE + cut.codec.raw_size(cut.numel, block_count)
