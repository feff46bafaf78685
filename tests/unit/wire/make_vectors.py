"""Writes the test vectors in `vectors`, with which an encoder or decoder in another language checks itself.

python -m tests.unit.wire.make_vectors
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from blake3 import blake3
from numpy.typing import NDArray

from skerry.wire import Codec, Compressor, Encoding, FragmentLayout, TensorSpec
from skerry.wire.digests import delta_digest, tree_digest
from skerry.wire.frames import encode_frames, parse_frames, raw_bytes

DIRECTORY = Path(__file__).parent / "vectors"
Json = dict[str, Any]

LAYOUT = FragmentLayout(
    "example",
    (
        TensorSpec("matrix", (3, 5)),
        TensorSpec("bias", (5,)),
        TensorSpec("empty", (0, 4)),
        TensorSpec("rows", (2, 8)),
        TensorSpec("scalar", ()),
        TensorSpec("odd", (1, 3)),
    ),
)


def scattered(numel: int) -> NDArray[np.float32]:
    """Return values of many magnitudes that any language can make again: they come from SHA-256."""
    values = []
    for index in range(numel):
        word, exponent = struct.unpack_from("<iB", hashlib.sha256(index.to_bytes(4, "little")).digest())
        values.append(word * 2.0 ** (exponent % 40 - 60))
    return np.array(values, np.float32)


def near(numel: int) -> NDArray[np.float32]:
    """Return values of one magnitude, on a grid of quarters: full of ties."""
    words = hashlib.sha256(b"near").digest() * (numel // 32 + 1)
    return np.array([(word - 128) / 4 for word in words[:numel]], np.float32)


def extreme(numel: int) -> NDArray[np.float32]:
    """Return values from the ends of the format."""
    ends = [0.0, -0.0, 2.0**-149, -(2.0**-126), 2.0**-125, -(2.0**-119), 2.0**-118, 2.0**-117, 1.0, -1.0]
    ends += [2.0**127, -(2.0**127), 7 * 2.0**-125, 127 * 2.0**-125, -0.0, 0.0, 3.0]
    return np.array((ends * (numel // len(ends) + 1))[:numel], np.float32)


def patterns(values: NDArray[np.float32]) -> str:
    """Return each value's bits as eight hexadecimal digits, the sign first, with a space between values."""
    return " ".join(f"{pattern:08x}" for pattern in values.view(np.uint32).tolist())


def tensors_json(layout: FragmentLayout) -> list[Json]:
    return [{"name": tensor.name, "shape": list(tensor.shape)} for tensor in layout.tensors]


def case(name: str, values: NDArray[np.float32], encoding: Encoding, first: int = 0) -> Json:
    """Return one vector: what goes in, the frames, and what comes out."""
    decoded = np.empty_like(values)
    digest = blake3()
    frames = list(encode_frames(values, LAYOUT, encoding, first=first, decoded=decoded, digest=digest))
    raw = [raw_bytes(frame) for frame in parse_frames(b"".join(frames))]
    return {
        "name": name,
        "codec": encoding.codec,
        "vector_codec": encoding.vector_codec,
        "block": encoding.block,
        "compressor": encoding.compressor,
        "first": first,
        "values": patterns(values),
        "frames": [frame.hex() for frame in frames],
        "raw": [data.hex() for data in raw],
        "decoded": patterns(decoded),
        "part_digest": digest.digest().hex(),
        "tree_digest": tree_digest(decoded).hex(),
    }


def codec_vectors(codec: Codec) -> Json:
    """Return the vectors of one codec, without compression, so that an encoder can check every byte."""
    encoding = Encoding(codec, block=4, vector_codec=codec, compressor=Compressor.NONE)
    numel = LAYOUT.numel
    finite = extreme(numel)
    cases = [
        case("many magnitudes", scattered(numel), encoding),
        case("ties", near(numel), encoding),
        case("ends of the format", finite, encoding),
        case("zeros", np.zeros(numel, np.float32), encoding),
        case("a part that starts inside a tensor", scattered(numel)[4:36], encoding, first=4),
        case("blocks of one", near(numel), Encoding(codec, 1, codec, Compressor.NONE)),
        case("vectors as float32", scattered(numel), Encoding(codec, 4, Codec.FLOAT32, Compressor.NONE)),
    ]
    return {"tensors": tensors_json(LAYOUT), "cases": cases}


def compressed_vectors() -> Json:
    """Return frames whose payload zstd made: for decoders only, for its bytes depend on its version."""
    values = np.zeros(LAYOUT.numel, np.float32)
    values[20:24] = [1, -2, 3, -4]
    cases = [
        case(f"{codec}, mostly zeros", values, Encoding(codec, block=4, vector_codec=Codec.FLOAT32)) for codec in Codec
    ]
    return {"tensors": tensors_json(LAYOUT), "cases": cases}


def digest_vectors() -> Json:
    """Return digests of deltas and trees."""
    parts = [(0, 15, hashlib.sha256(b"one").digest()), (15, 25, hashlib.sha256(b"two").digest())]
    two_leaves = np.arange(2**20 + 3, dtype=np.float32)
    return {
        "deltas": [
            {
                "parts": [{"first": first, "numel": numel, "digest": digest.hex()} for first, numel, digest in parts],
                "delta_digest": delta_digest(parts).hex(),
            }
        ],
        "trees": [
            {
                "values": words,
                "numel": len(values),
                "tree_digest": tree_digest(values).hex(),
            }
            for words, values in (("none", two_leaves[:0]), ("0, 1, 2, ...", two_leaves))
        ],
    }


def frame_of(payload: bytes, **changes: Any) -> str:
    """Return a frame with a right checksum; by default the matrix: 15 int8 elements in 4 blocks."""
    fields: Json = {
        "magic": b"SKF1", "codec": 3, "compressor": 0, "block": 4, "first": 0, "numel": 15,
        "payload_size": len(payload), "raw_size": 31,
    } | changes  # fmt: skip
    header = struct.pack("<4sBBHQIII", *fields.values())
    return (header + struct.pack("<I", zlib.crc32(header + payload)) + payload).hex()


def refused_vectors() -> Json:
    """Return frames that a decoder must refuse, each with the reason that this project gives."""
    scales = np.ones(4, np.float32)
    good = scales.tobytes() + bytes(15)

    def scaled(scale: float) -> bytes:
        return np.array([1, scale, 1, 1], np.float32).tobytes() + bytes(15)

    def zeros(declared: int | None, actual: int) -> bytes:
        """Return a zstd frame of `actual` zeros that declares another size, or none; any zstd writes these bytes."""
        size = b"\0\x58" if declared is None else bytes([0x20, declared])
        return b"\x28\xb5\x2f\xfd" + size + (actual << 3 | 3).to_bytes(3, "little") + b"\0"

    corrupt = bytearray.fromhex(frame_of(good))
    corrupt[40] ^= 1
    infinite = np.full(15, np.inf, np.float32).tobytes()
    cases = [
        ("a payload's bit is flipped", "CHECKSUM", corrupt.hex()),
        ("ends inside the header", "TRUNCATED", frame_of(good)[:40]),
        ("ends inside the payload", "TRUNCATED", frame_of(good)[:-2]),
        ("another magic", "BAD_HEADER", frame_of(good, magic=b"SKF0")),
        ("an unknown codec", "BAD_HEADER", frame_of(good, codec=99)),
        ("an unknown compressor", "BAD_HEADER", frame_of(good, compressor=9)),
        ("a block codec without a block", "BAD_HEADER", frame_of(good, block=0)),
        ("a block without a block codec", "BAD_HEADER", frame_of(bytes(60), codec=1)),
        ("no elements", "BAD_HEADER", frame_of(good, numel=0)),
        ("elements past 2^63", "BAD_HEADER", frame_of(good, first=2**64 - 1)),
        ("too many elements", "TOO_LARGE", frame_of(good, numel=2**18 + 1)),
        ("a raw size that no layout gives", "BOMB", frame_of(good, raw_size=2**31)),
        ("a raw size below that of full blocks", "BOMB", frame_of(good, raw_size=30)),
        ("a raw size that this layout does not give", "BOMB", frame_of(good + bytes(4), raw_size=35)),
        ("starts inside a block", "LAYOUT", frame_of(good, first=2)),
        ("ends past the fragment", "LAYOUT", frame_of(good, first=32)),
        ("zstd declares a gibibyte", "BOMB", frame_of(bytes.fromhex("28b52ffda00000004000000000"), compressor=1)),
        ("zstd declares no size", "BOMB", frame_of(zeros(None, 31), compressor=1)),
        ("zstd declares the size of one byte more", "BOMB", frame_of(zeros(32, 32), compressor=1)),
        ("zstd declares the size and grows past it", "CORRUPT", frame_of(zeros(31, 40), compressor=1)),
        ("zstd declares the size and ends before it", "CORRUPT", frame_of(zeros(31, 20), compressor=1)),
        ("a zstd frame that is cut short", "CORRUPT", frame_of(zeros(31, 31)[:-1], compressor=1)),
        ("not zstd", "CORRUPT", frame_of(b"nonsense", compressor=1)),
        ("bytes after the zstd frame", "CORRUPT", frame_of(zstandard.compress(bytes(31)) + b"x", compressor=1)),
        ("raw bytes that claim to be compressed", "BAD_HEADER", frame_of(good, compressor=1)),
        ("a payload above its raw size", "TOO_LARGE", frame_of(good + bytes(1))),
        ("ends inside the payload, with a wrong raw size", "BOMB", frame_of(good, raw_size=2**31)[:-2]),
        ("a scale of NaN", "NON_FINITE", frame_of(scaled(np.nan))),
        ("an infinite scale", "NON_FINITE", frame_of(scaled(-np.inf))),
        ("a negative scale", "BAD_SCALE", frame_of(scaled(-1))),
        ("a negative zero scale", "BAD_SCALE", frame_of(scaled(-0.0))),
        ("a scale below 2^-125", "BAD_SCALE", frame_of(scaled(2.0**-126))),
        ("a scale above 2^127 / 127", "BAD_SCALE", frame_of(scaled(2.0**121))),
        ("a scale below the normal numbers", "BAD_SCALE", frame_of(scaled(2.0**-149))),
        ("an infinite element", "NON_FINITE", frame_of(infinite, codec=1, block=0, raw_size=len(infinite))),
    ]  # fmt: skip
    return {
        "tensors": tensors_json(LAYOUT),
        "cases": [{"name": name, "reason": reason, "frame": frame} for name, reason, frame in cases],
    }


def all_vectors() -> dict[str, Json]:
    """Return the content of each file by its name."""
    return {f"{codec}.json": codec_vectors(codec) for codec in Codec} | {
        "compressed.json": compressed_vectors(),
        "digests.json": digest_vectors(),
        "refused.json": refused_vectors(),
    }


def _without_zstd_bytes(vectors: Json) -> Json:
    """Return vectors without compressed payloads, which differ between versions of zstd; `raw` says the same."""
    return vectors | {"cases": [{**case, "frames": len(case["frames"])} for case in vectors["cases"]]}


def differences() -> list[str]:
    """Return the names of files that are not what this script would write."""
    wrong = []
    for name, expected in all_vectors().items():
        path = DIRECTORY / name
        actual = json.loads(path.read_text()) if path.exists() else {"cases": []}
        if name == "compressed.json":
            actual, expected = _without_zstd_bytes(actual), _without_zstd_bytes(expected)  # noqa: PLW2901 - compared only
        if actual != expected:
            wrong.append(name)
    return wrong


if __name__ == "__main__":
    for name, vectors in all_vectors().items():
        (DIRECTORY / name).write_text(json.dumps(vectors, indent=1) + "\n")
