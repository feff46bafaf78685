"""Frames: the smallest pieces of a fragment that can be sent or stored by themselves.

A frame is a 32-byte header and a payload. The header says how it was written and which range of the fragment it covers,
so a frame can be checked and decoded without its neighbours. protos/FORMAT.md specifies it for other languages.
`FrameReader` cuts frames from bytes that arrive in pieces of any size.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from zlib_ng.zlib_ng import crc32  # 15 times as fast as zlib's

from skerry.wire.codecs import (
    CODEC_OF_NUMBER,
    COMPRESSORS,
    HEADER_SIZE,
    MAX_FRAME_NUMEL,
    Codec,
    Compressor,
    Cut,
    Encoding,
    compress,
    cut_frames,
    decompress_exactly,
)
from skerry.wire.errors import FrameError, WireReason
from skerry.wire.layout import Blocks, FragmentLayout, blocks_of
from skerry.wire.quantise import check_range_array, dequantise, non_finite_error, quantise

MAGIC: Final = b"SKF1"
_HEADER: Final = struct.Struct("<4sBBHQIII")  # the CRC-32 follows
_CRC: Final = struct.Struct("<I")
_LARGEST_ELEMENT: Final = 2**63 - 1


class Frame(NamedTuple):
    """A frame whose header, and checksum if it has its payload, are right; `decode_frame` checks that it fits."""

    codec: Codec
    compressor: Compressor
    block: int
    """0 where the codec has no blocks."""
    first: int
    """First element, in the fragment."""
    numel: int
    payload_size: int
    raw_size: int
    """Declared bytes once decompressed, at most 5 an element: a code, and a scale where a block has one element."""
    payload: bytes | memoryview = b""

    @property
    def frame_size(self) -> int:
        """Bytes of the whole frame, at most those of the header and 5 an element."""
        return HEADER_SIZE + self.payload_size


def encode_frames(
    values: NDArray[np.float32],  # (numel of the range,)
    layout: FragmentLayout,
    encoding: Encoding,
    *,
    first: int = 0,
    base: NDArray[np.float32] | None = None,
    decoded: NDArray[np.float32] | None = None,
    digest: blake3 | None = None,
) -> Iterator[bytes]:
    """Yield whole frames that cover elements `[first, first + len(values))` of the fragment.

    `base` and `decoded`, where given, have the shape of `values`. With `base`, base - values is encoded. Each frame's
    part of `decoded`, which may be `values` itself, is overwritten, before the frame is yielded, with what a receiver
    will decode. `digest` is fed each frame's raw bytes.

    Raises:
        ValueError: (at once) an array is not one-dimensional float32, or the range is not cut at block boundaries.
        NonFiniteError: (from the frame that meets it) a value that the codec cannot carry; frames before it stand.
    """
    check_range_array("values", values)
    for name, array in (("base", base), ("decoded", decoded)):
        if array is not None:
            check_range_array(name, array)
            if array.shape != values.shape or not array.flags.c_contiguous:
                msg = f"{name} must be contiguous, as long as values. expected={values.shape}, actual={array.shape}"
                raise ValueError(msg)

    def frame(cut: Cut) -> bytes:
        inside = slice(cut.first - first, cut.first - first + cut.numel)
        piece, out = values[inside], None if decoded is None else decoded[inside]
        if base is not None:
            piece = np.subtract(base[inside], piece, out=out)
        raw = quantise_cut(np.ascontiguousarray(piece), layout, cut, decoded=out)
        if digest is not None:
            digest.update(raw.data)
        return pack_frame(cut, raw, encoding)

    return map(frame, cut_frames(layout, encoding, first, len(values)))


def quantise_cut(
    values: NDArray[np.float32],  # (cut.numel,) contiguous
    layout: FragmentLayout,
    cut: Cut,
    *,
    decoded: NDArray[np.float32] | None = None,
) -> NDArray[np.uint8]:
    """Return the raw bytes of one frame, valid until this thread's next call; `decoded` is as for `encode_frames`.

    Raises:
        NonFiniteError: a value that the codec cannot carry.
    """
    blocks = blocks_of(layout, cut.first, cut.numel, cut.block) if cut.block else None
    raw = quantise(cut.codec, values, blocks, decoded)
    if raw is None:
        raise non_finite_error(values, layout, cut)
    return raw


def pack_frame(cut: Cut, raw: NDArray[np.uint8], encoding: Encoding) -> bytes:
    """Return the frame of these raw bytes; those that compression does not make fewer are stored as they are."""
    payload: bytes | memoryview = raw.data
    compressor = Compressor.NONE
    # zstd saves 2 of 32 bits of float32 and takes 10 ns an element, which is not worth it.
    if encoding.compressor is Compressor.ZSTD and cut.codec is not Codec.FLOAT32:
        compressed = compress(raw.data)
        if len(compressed) < raw.nbytes:
            payload, compressor = compressed, Compressor.ZSTD
    header = _HEADER.pack(
        MAGIC,
        cut.codec.number,
        COMPRESSORS.index(compressor),
        cut.block,
        cut.first,
        cut.numel,
        len(payload),
        raw.nbytes,
    )
    checksum = crc32(payload, crc32(header))
    return b"".join((header, _CRC.pack(checksum), payload))


def parse_header(buffer: bytes | bytearray | memoryview) -> Frame:
    """Return the frame at the start of `buffer` without its payload, checked as far as it can be without a layout.

    Raises:
        FrameError: TRUNCATED, BAD_HEADER, TOO_LARGE or BOMB. The checksum is for `parse_frames`.
    """
    if len(buffer) < HEADER_SIZE:
        raise FrameError(WireReason.TRUNCATED, f"header is cut. expected={HEADER_SIZE}, actual={len(buffer)}")
    magic, codec_number, compressor_number, block, first, numel, payload_size, raw_size = _HEADER.unpack_from(buffer)
    codec = CODEC_OF_NUMBER.get(codec_number)
    compressor = COMPRESSORS[compressor_number] if compressor_number < len(COMPRESSORS) else None
    if magic != MAGIC or codec is None or compressor is None:
        msg = f"not a frame. magic={magic!r}, codec={codec_number}, compressor={compressor_number}"
        raise FrameError(WireReason.BAD_HEADER, msg)
    if (block > 0) != codec.has_blocks or numel == 0 or first + numel > _LARGEST_ELEMENT:
        msg = f"impossible header. codec={codec}, block={block}, first={first}, numel={numel}"
        raise FrameError(WireReason.BAD_HEADER, msg)
    if numel > MAX_FRAME_NUMEL:
        raise FrameError(WireReason.TOO_LARGE, f"too many elements in a frame. limit={MAX_FRAME_NUMEL}, actual={numel}")
    # Without the layout the count of blocks is only known to lie between one run of full ones and one an element.
    least = codec.raw_size(numel, -(-numel // block) if block else 0)
    most = codec.raw_size(numel, numel)
    if not least <= raw_size <= most:
        msg = f"declared size is not the codec's. declared={raw_size}, least={least}, most={most}"
        raise FrameError(WireReason.BOMB, msg)
    if payload_size > raw_size:
        msg = f"payload larger than what it stands for. payload={payload_size}, raw={raw_size}"
        raise FrameError(WireReason.TOO_LARGE, msg)
    if (payload_size == raw_size) != (compressor is Compressor.NONE):
        msg = f"payload's size and compressor disagree. payload={payload_size}, raw={raw_size}"
        raise FrameError(WireReason.BAD_HEADER, msg)
    return Frame(codec, compressor, block, first, numel, payload_size, raw_size)


def parse_frames(buffer: bytes | bytearray | memoryview) -> Iterator[Frame]:
    """Yield the frames of a buffer that holds whole ones; their payloads are views of it.

    Raises:
        FrameError: TRUNCATED, BAD_HEADER, TOO_LARGE, BOMB or CHECKSUM, when the wrong frame is reached.
    """
    rest = memoryview(buffer).cast("B").toreadonly()
    while rest:
        header = parse_header(rest)
        end = header.frame_size
        if len(rest) < end:
            raise FrameError(WireReason.TRUNCATED, f"bytes end inside a payload. expected={end}, actual={len(rest)}")
        payload = rest[HEADER_SIZE:end]
        (expected,) = _CRC.unpack_from(rest, _HEADER.size)
        actual = crc32(payload, crc32(rest[: _HEADER.size]))
        if actual != expected:
            msg = f"checksum mismatch. expected={expected:08x}, actual={actual:08x}, first={header.first}"
            raise FrameError(WireReason.CHECKSUM, msg)
        yield header._replace(payload=payload)
        rest = rest[end:]


def raw_bytes(frame: Frame) -> bytes | memoryview:
    """Return the frame's uncompressed scales and codes: what digests are taken over.

    Raises:
        FrameError: BOMB or CORRUPT, before more than `raw_size` bytes are allocated.
    """
    is_plain = frame.compressor is Compressor.NONE
    return frame.payload if is_plain else decompress_exactly(frame.payload, frame.raw_size)


def decode_frame(frame: Frame, layout: FragmentLayout, out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """Return the frame's elements, `(frame.numel,)` float32; in `out`, when it is given.

    Raises:
        FrameError: LAYOUT or BOMB when it does not fit the fragment; CORRUPT, NON_FINITE or BAD_SCALE for its content.
        ValueError: `out` is not contiguous float32 of the frame's length.
    """
    if out is None:
        out = np.empty(frame.numel, np.float32)
    blocks, raw = open_frame(frame, layout, out)
    dequantise(frame.codec, raw, blocks, out)
    return out


def open_frame(
    frame: Frame, layout: FragmentLayout, out: NDArray[np.float32]
) -> tuple[Blocks | None, NDArray[np.uint8]]:
    """Return the frame's blocks, None where it has none, and its raw bytes; `out` is what they are to be decoded to.

    Raises:
        FrameError, ValueError: as `decode_frame`, but for wrong scales and values.
    """
    if frame.first + frame.numel > layout.numel:
        msg = f"frame past the fragment's end. numel={layout.numel}, first={frame.first}, frame_numel={frame.numel}"
        raise FrameError(WireReason.LAYOUT, msg)
    try:
        blocks = blocks_of(layout, frame.first, frame.numel, frame.block) if frame.block else None
    except ValueError as error:
        raise FrameError(WireReason.LAYOUT, str(error)) from error
    check_range_array("out", out)
    if len(out) != frame.numel or not out.flags.c_contiguous:
        raise ValueError(f"out must be contiguous and as long as the frame. expected={frame.numel}, actual={out.shape}")
    # Checked against the layout before anything of the declared size is allocated.
    expected = frame.codec.raw_size(frame.numel, blocks.count if blocks else 0)
    if frame.raw_size != expected:
        msg = f"declared size is not what the layout implies. expected={expected}, declared={frame.raw_size}"
        raise FrameError(WireReason.BOMB, msg)
    return blocks, np.frombuffer(raw_bytes(frame), np.uint8)


@dataclass(frozen=True)
class FrameBatch:
    """Whole frames that cover `[first, first + numel)`. Their checksums are checked when they are decoded."""

    first: int
    numel: int
    data: bytes | memoryview


class FrameReader:
    """Cuts whole frames that must cover a range in order, without a gap or an overlap.

    A batch is a view of the piece that it came in; only a frame that came in several pieces is copied, as a batch of
    its own. A header is checked before its payload is kept, so a reader holds at most a frame.
    """

    def __init__(self, first: int, numel: int, *, batch_numel: int = 1) -> None:
        """Expects the range `[first, first + numel)`; a batch ends with its piece or has `batch_numel` elements."""
        self._at, self._stop = first, first + numel
        self._batch_numel = batch_numel
        self._begun = bytearray()  # of the frame that begins at `_at`

    def feed(self, piece: bytes | bytearray | memoryview) -> list[FrameBatch]:
        """Returns the batches that `piece` completes.

        Raises:
            FrameError: LAYOUT, BAD_HEADER, TOO_LARGE or BOMB, by a header alone.
        """
        rest, batches = memoryview(piece), list[FrameBatch]()
        if self._begun:
            rest = self._fill(HEADER_SIZE, rest)
            if len(self._begun) < HEADER_SIZE:
                return []
            header = self._following(self._begun, self._at)
            rest = self._fill(header.frame_size, rest)
            if len(self._begun) < header.frame_size:
                return []
            batches.append(self._batch(bytes(self._begun), header.numel))
            self._begun.clear()
        size = numel = 0  # of the whole frames at the front of `rest`
        while len(rest) - size >= HEADER_SIZE:
            header = self._following(rest[size : size + HEADER_SIZE], self._at + numel)
            if len(rest) - size < header.frame_size:
                break
            size, numel = size + header.frame_size, numel + header.numel
            if numel >= self._batch_numel:
                batches.append(self._batch(rest[:size], numel))
                rest, size, numel = rest[size:], 0, 0
        if numel:
            batches.append(self._batch(rest[:size], numel))
        self._begun += rest[size:]
        return batches

    def finish(self) -> None:
        """Checks that nothing is missing.

        Raises:
            FrameError: TRUNCATED: the frames end before their range does, or the bytes inside a frame.
        """
        if self._at != self._stop or self._begun:
            raise FrameError(
                WireReason.TRUNCATED, f"frames end before their range does. expected={self._stop}, actual={self._at}"
            )

    def _fill(self, size: int, rest: memoryview) -> memoryview:
        """Takes what is missing of the first `size` bytes of the frame that has begun; returns what is left."""
        missing = max(0, size - len(self._begun))
        self._begun += rest[:missing]
        return rest[missing:]

    def _following(self, data: bytearray | memoryview, position: int) -> Frame:
        header = parse_header(data)
        if header.first != position or header.first + header.numel > self._stop:
            raise FrameError(
                WireReason.LAYOUT,
                f"frame out of place. expected_first={position}, range_end={self._stop}, "
                f"first={header.first}, numel={header.numel}",
            )
        return header

    def _batch(self, data: bytes | memoryview, numel: int) -> FrameBatch:
        first, self._at = self._at, self._at + numel
        return FrameBatch(first, numel, data)
