"""A second codec, written from FORMAT.md alone: one element at a time, in exact rational arithmetic.

It shares no code with the product, so it says whether the specification and the product agree.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import zstandard

BLOCK_CODECS = {3: (127, 8), 4: (7, 4)}  # top code, bits


@dataclass(frozen=True)
class SlowFrame:
    codec: int
    block: int
    first: int
    numel: int
    raw: bytes


def float32(value: Fraction) -> Fraction:
    """Round to the nearest float32, ties to even; exact, so no machine's arithmetic is trusted."""
    if value == 0:
        return Fraction(0)
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    if abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    step = Fraction(2) ** (max(exponent, -126) - 23)
    return round(value / step) * step


def from_bits(pattern: int) -> Fraction:
    return Fraction(struct.unpack("<f", struct.pack("<I", pattern))[0])


def to_bits(value: Fraction) -> int:
    return int(struct.unpack("<I", struct.pack("<f", float(value)))[0])


def block_lengths(shapes: list[tuple[int, int]], first: int, numel: int, block: int) -> Iterator[int]:
    """Yield the lengths of the blocks of a range; `shapes` are tensors' (first element, element count)."""
    for start, count in shapes:
        low, high = max(start, first), min(start + count, first + numel)
        while low < high:
            length = min(block, high - low)
            yield length
            low += length


def quantise(values: list[Fraction], codec: int, lengths: list[int]) -> bytes:
    """Return a frame's raw bytes for a block codec."""
    top_code, bits = BLOCK_CODECS[codec]
    scales, codes = b"", []
    at = 0
    for length in lengths:
        members = values[at : at + length]
        at += length
        scale = float32(max(abs(member) for member in members) / top_code)
        if scale < Fraction(2) ** -125:
            scale = Fraction(0)
        scales += struct.pack("<I", to_bits(scale))
        codes += [_code(member, scale, codec) for member in members]
    if bits == 8:
        return scales + bytes(codes)
    if len(codes) % 2:
        codes.append(0)
    return scales + bytes(low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True))


def _code(value: Fraction, scale: Fraction, codec: int) -> int:
    if scale == 0:
        return 0
    return round(float32(value / scale)) & (0xFF if codec == 3 else 0xF)


def dequantise(frame: SlowFrame, lengths: list[int]) -> list[int]:
    """Return the bit patterns of the frame's elements."""
    if frame.codec == 1:
        return list(struct.unpack(f"<{frame.numel}I", frame.raw))
    scales = [from_bits(pattern) for pattern in struct.unpack_from(f"<{len(lengths)}I", frame.raw)]
    codes: list[int] = list(frame.raw[4 * len(lengths) :])
    if frame.codec != 3:
        codes = [nibble for byte in codes for nibble in (byte & 15, byte >> 4)]
    per_element = [scale for scale, length in zip(scales, lengths, strict=True) for _ in range(length)]
    return [
        to_bits(float32(_meaning(code, frame.codec) * scale))
        for code, scale in zip(codes, per_element, strict=False)  # an odd count leaves a nibble over
    ]


def _meaning(code: int, codec: int) -> Fraction:
    half = 128 if codec == 3 else 8
    return Fraction(code - 2 * half if code >= half else code)


def frames(buffer: bytes) -> Iterator[SlowFrame]:
    """Yield the frames of a buffer; any fault is an AssertionError."""
    while buffer:
        magic, codec, compressor, block, first, numel, payload_size, raw_size, crc = struct.unpack_from(
            "<4sBBHQIIII", buffer
        )
        payload = buffer[32 : 32 + payload_size]
        assert magic == b"SKF1"
        assert zlib.crc32(buffer[:28] + payload) == crc
        raw = payload if compressor == 0 else zstandard.decompress(payload, max_output_size=raw_size)
        assert len(raw) == raw_size
        yield SlowFrame(codec, block, first, numel, raw)
        buffer = buffer[32 + payload_size :]
