"""The bytes of the recorded session: a fragment, its values, its frames and its snapshots."""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from skerry.wire import Codec, Compressor, Encoding, FragmentLayout, TensorSpec
from skerry.wire.frames import encode_frames

Float32s = NDArray[np.float32]
Json = dict[str, Any]

LAYOUT = FragmentLayout(
    "body",
    (
        TensorSpec("__metadata__", (5,)),
        TensorSpec("__metadata__.tensor", (2,)),
        TensorSpec("embed.weight", (6, 8)),
        TensorSpec("scale", ()),
        TensorSpec("block/0: läuft", (3, 2, 4)),
    ),
)
RANGES = ((0, 55), (55, 25))  # both start and end with tensors
ENCODING = Encoding(Codec.INT4, block=16, compressor=Compressor.NONE)


def identifier(of: str) -> str:
    """Returns 128 bits that any language can make again."""
    return hashlib.sha256(f"skerry session {of}".encode()).hexdigest()[:32]


def values(of: str, largest: float) -> Float32s:
    """Returns float32 values up to about `largest`, made of SHA-256."""
    words = [hashlib.sha256(f"{of} {index}".encode()).digest() for index in range(LAYOUT.numel)]
    return np.array([struct.unpack_from("<i", word)[0] * 2.0**-31 * largest for word in words], np.float32)


def frames_of(of_range: Float32s, first: int) -> tuple[bytes, Float32s, bytes]:
    """Returns a range's frames, what they decode to, and their part digest."""
    decoded, digest = np.empty_like(of_range), blake3()
    frames = list(encode_frames(of_range, LAYOUT, ENCODING, first=first, decoded=decoded, digest=digest))
    return b"".join(_compressed(frame) for frame in frames), decoded, digest.digest()


def _compressed(frame: bytes) -> bytes:
    """Returns a frame of nothing but zeros with a zstd payload, written by hand: the same by every version of zstd."""
    *head, payload_size, raw_size = struct.unpack_from("<4sBBHQIII", frame)
    if any(frame[32:]):
        return frame
    payload = b"\x28\xb5\x2f\xfd\x20" + bytes([raw_size]) + (raw_size << 3 | 3).to_bytes(3, "little") + b"\0"
    assert len(payload) < payload_size <= 255
    head[2] = 1
    header = struct.pack("<4sBBHQIII", *head, len(payload), raw_size)
    checksum = zlib.crc32(payload, zlib.crc32(header))
    return b"".join((header, struct.pack("<I", checksum), payload))


def safetensors_of(weights: Float32s, first: int, numel: int) -> bytes:
    """Returns a snapshot of the range; its keys and data come last tensor first, as a reader has to expect."""
    held = [(LAYOUT.tensors[index], slice(start, stop)) for index, start, stop in LAYOUT.ranges(first, numel)]
    names = {tensor.name for tensor, _ in held}
    header: Json = {"__metadata__": {"format": "1", "fragment": LAYOUT.name, "kind": "weights"}}
    data = b""
    for tensor, where in reversed(held):
        key = tensor.name
        if key == "__metadata__":
            key += ".tensor"
            while key in names:
                key += ".tensor"
        piece = weights[where].tobytes()
        header[key] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(piece)]}
        data += piece
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data
