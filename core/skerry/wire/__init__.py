"""Everything that two processes must agree on byte for byte: layouts, codecs, frames, snapshots and digests.

protos/FORMAT.md specifies them for other languages; test vectors are in `tests/wire/vectors`.
"""

import sys

from skerry.wire.codecs import HEADER_SIZE, MAX_FRAME_NUMEL, Codec, Compressor, Encoding, cut_parts
from skerry.wire.digests import Hasher, delta_digest, part_digest, tree_digest, tree_leaves, tree_root
from skerry.wire.errors import FrameError, NonFiniteError, TensorFileError, WireError, WireReason
from skerry.wire.frames import (
    MAX_FRAME_BYTES,
    Frame,
    FrameBatch,
    FrameReader,
    decode_frame,
    decode_frames,
    encode_frames,
    parse_frames,
    raw_bytes,
)
from skerry.wire.layout import FragmentLayout, TensorSpec
from skerry.wire.safetensors import TensorFileReader

__all__ = [
    "HEADER_SIZE",
    "MAX_FRAME_BYTES",
    "MAX_FRAME_NUMEL",
    "Codec",
    "Compressor",
    "Encoding",
    "FragmentLayout",
    "Frame",
    "FrameBatch",
    "FrameError",
    "FrameReader",
    "Hasher",
    "NonFiniteError",
    "TensorFileError",
    "TensorFileReader",
    "TensorSpec",
    "WireError",
    "WireReason",
    "cut_parts",
    "decode_frame",
    "decode_frames",
    "delta_digest",
    "encode_frames",
    "parse_frames",
    "part_digest",
    "raw_bytes",
    "tree_digest",
    "tree_leaves",
    "tree_root",
]

if sys.byteorder != "little":
    # Arrays are read and written as they lie in memory, so a big-endian machine would need an encoder of its own.
    raise ImportError("skerry.wire needs a little-endian machine")
