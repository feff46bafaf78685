"""The formats in which a fragment's elements are sent and stored, and their sizes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from skerry.wire.layout import TensorSpec

MAX_BLOCK: Final = 2**16 - 1
"""The block's length is a u16 in the frame header."""
MAX_LEVEL: Final = 19
"""Higher zstd levels need larger windows than a peer has to accept."""


class Codec(StrEnum):
    """How one element is written. `number` is what the frame header holds."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    INT4 = "int4"
    E3M0 = "e3m0"

    @property
    def number(self) -> int:
        """The codec's number in a frame header."""
        return _CODEC_NUMBERS[self]

    @property
    def bits(self) -> int:
        """Bits an element, scales apart."""
        return _CODEC_BITS[self]

    @property
    def has_blocks(self) -> bool:
        """Whether elements are written as codes relative to their block's scale."""
        return self in _TOP_CODES

    @property
    def top_code(self) -> int:
        """The scale is a block's largest magnitude divided by this; block codecs only."""
        return _TOP_CODES[self]

    def code_size(self, numel: int) -> int:
        """Bytes of `numel` codes or elements, scales apart."""
        return (numel * self.bits + 7) // 8

    def raw_size(self, numel: int, block_count: int) -> int:
        """Uncompressed bytes of a frame with `block_count` blocks (not looked at where the codec has none)."""
        return self.code_size(numel) + (4 * block_count if self.has_blocks else 0)


_CODEC_NUMBERS: Final = {Codec.FLOAT32: 1, Codec.BFLOAT16: 2, Codec.INT8: 3, Codec.INT4: 4, Codec.E3M0: 5}
_CODEC_BITS: Final = {Codec.FLOAT32: 32, Codec.BFLOAT16: 16, Codec.INT8: 8, Codec.INT4: 4, Codec.E3M0: 4}
_TOP_CODES: Final = {Codec.INT8: 127, Codec.INT4: 7, Codec.E3M0: 1}
CODEC_OF_NUMBER: Final = {number: codec for codec, number in _CODEC_NUMBERS.items()}


class Compressor(StrEnum):
    """How a frame's bytes are compressed. `number` is what the frame header holds."""

    NONE = "none"
    ZSTD = "zstd"

    @property
    def number(self) -> int:
        """The compressor's number in a frame header."""
        return _COMPRESSOR_NUMBERS[self]


_COMPRESSOR_NUMBERS: Final = {Compressor.NONE: 0, Compressor.ZSTD: 1}
COMPRESSOR_OF_NUMBER: Final = {number: compressor for compressor, number in _COMPRESSOR_NUMBERS.items()}


@dataclass(frozen=True)
class Encoding:
    """What a sender chooses. A receiver needs none of it, because every frame says how it was written.

    Raises:
        ValueError: a field is out of its range.
    """

    codec: Codec
    block: int = 128
    """Elements that share a scale, 1 to 65535. 128 costs a quarter bit an element."""
    vector_codec: Codec = Codec.BFLOAT16
    """For tensors of at most one dimension, whose few elements matter most. Ignored where `codec` has no blocks."""
    compressor: Compressor = Compressor.ZSTD
    level: int = 1
    """zstd level, 1 to 19. Above 1 it only gets slower on codes, not smaller."""

    def __post_init__(self) -> None:
        """Refuse what no frame header can hold."""
        if not 1 <= self.block <= MAX_BLOCK:
            msg = f"block must be 1 to {MAX_BLOCK}. block={self.block}"
            raise ValueError(msg)
        if not 1 <= self.level <= MAX_LEVEL:
            msg = f"level must be 1 to {MAX_LEVEL}. level={self.level}"
            raise ValueError(msg)

    def codec_for(self, tensor: TensorSpec) -> Codec:
        """Return the codec that this tensor's elements take."""
        return self.vector_codec if tensor.is_vector and self.codec.has_blocks else self.codec
