"""Everything that two processes must agree on byte for byte: layouts, codecs, frames, snapshots and digests.

The package itself has the types that say what is sent and how, and their errors; what makes and reads the bytes is in
its modules. protos/FORMAT.md specifies them for other languages; test vectors are in `tests/unit/wire/vectors`.
"""

import sys

from skerry.wire.codecs import Codec, Compressor, Encoding
from skerry.wire.errors import NonFiniteError, WireError
from skerry.wire.layout import FragmentLayout, TensorSpec

__all__ = ["Codec", "Compressor", "Encoding", "FragmentLayout", "NonFiniteError", "TensorSpec", "WireError"]

if sys.byteorder != "little":
    # Arrays are read and written as they lie in memory, so a big-endian machine would need an encoder of its own.
    raise ImportError("skerry.wire needs a little-endian machine")
