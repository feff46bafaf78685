"""The bytes of a tensor as a delta against the bytes that it had: two encodings, both compressed with zstd.

- xor: old XOR new.
- overwrite: the number of bytes that changed, their places, and their new values; numbers are little-endian uint32.

Source: github.com/THUDM/slime/pull/2089, slime/utils/disk_delta.py.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from zstandard import ZstdCompressor, ZstdDecompressor, ZstdError

from skerry.exchange.adopt import corrupt

Bytes: TypeAlias = NDArray[np.uint8]  # (size_bytes,) of one tensor, little-endian and in row-major order

ENCODINGS: Final = ("xor", "overwrite")
# A place has four bytes.
OVERWRITE_LIMIT_BYTES: Final = 2**32
# The level that the receivers' stacks write. Changed mantissas are noise, which higher ones do not make smaller.
_LEVEL: Final = 1


def encode(old: Bytes, new: Bytes, encoding: str) -> bytes:
    """Returns what makes `new` of `old`, which has as many bytes."""
    if encoding == "xor":
        return ZstdCompressor(_LEVEL).compress((old ^ new).data)
    places = np.flatnonzero(old != new)
    numbers = np.append(len(places), places).astype("<u4")
    return ZstdCompressor(_LEVEL).compress(numbers.tobytes() + new[places].tobytes())


def apply(data: Bytes, delta: bytes | memoryview, encoding: str) -> None:
    """Changes `data` in place.

    Raises:
        CorruptDownloadError: the delta is not one of these bytes.
    """
    try:
        change = np.frombuffer(ZstdDecompressor().decompress(delta), np.uint8)
        if encoding == "xor":
            np.bitwise_xor(data, change, out=data)
        else:
            count = int(change[:4].view("<u4")[0])
            values = change[4 + 4 * count :]
            data[change[4 : 4 + 4 * count].view("<u4")] = values
    except (ZstdError, ValueError, IndexError) as error:
        raise corrupt(f"delta can't be applied. encoding={encoding}, cause={error!r}") from error


def checksum(data: Bytes) -> str:
    """Returns the BLAKE3 of a tensor's bytes in hexadecimal."""
    return blake3(data.data).hexdigest()
