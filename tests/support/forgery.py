"""Frames that no encoder writes, with valid checksums."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import numpy as np
import zstandard

from skerry.v1 import exchange_pb2 as exchange
from skerry.wire.codecs import COMPRESSORS, Codec, Compressor
from skerry.wire.digests import delta_digest
from tests.support.raw_learner import Float32s


def frame(
    payload: bytes,
    *,
    codec: Codec = Codec.FLOAT32,
    compressor: Compressor = Compressor.NONE,
    block: int = 0,
    first: int = 0,
    numel: int,
    raw_size: int | None = None,
) -> bytes:
    size = len(payload) if raw_size is None else raw_size
    header = struct.pack(
        "<4sBBHQIII", b"SKF1", codec.number, COMPRESSORS.index(compressor), block, first, numel, len(payload), size
    )
    return header + struct.pack("<I", zlib.crc32(payload, zlib.crc32(header))) + payload


def float32_frame(values: Float32s, *, first: int = 0) -> bytes:
    """A frame of any float32 values, including NaN."""
    return frame(values.astype("<f4").tobytes(), first=first, numel=len(values))


def int4_frame_with_scale(scale: float, numel: int, block: int = 128) -> bytes:
    """A frame of one tensor's elements whose every block has this scale."""
    scales = np.full(-(-numel // block), scale, "<f4").tobytes()
    return frame(scales + bytes((numel + 1) // 2), codec=Codec.INT4, block=block, numel=numel)


def bomb(numel: int, grown_bytes: int) -> bytes:
    """A frame that declares `numel` float32 elements and decompresses to `grown_bytes`."""
    payload = zstandard.ZstdCompressor(level=19).compress(bytes(grown_bytes))
    assert len(payload) < 4 * numel
    return frame(payload, compressor=Compressor.ZSTD, numel=numel, raw_size=4 * numel)


def messages(
    header: exchange.PushHeader, data: bytes, *, first: int = 0, numel: int, digest: bytes = bytes(32)
) -> Sequence[exchange.PushDeltaRequest]:
    """A push of one part with these bytes."""
    return [
        exchange.PushDeltaRequest(header=header),
        exchange.PushDeltaRequest(part=exchange.PartBegin(first=first, numel=numel)),
        exchange.PushDeltaRequest(data=data),
        exchange.PushDeltaRequest(part_end=exchange.PartEnd(digest=digest)),
        exchange.PushDeltaRequest(
            complete=exchange.PushComplete(digest=delta_digest([(first, numel, digest)]) if first >= 0 else digest)
        ),
    ]
