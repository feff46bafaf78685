"""BLAKE3 digests that sender and receiver both compute: of a whole delta, and of a fragment's values.

The digest of a part is the BLAKE3 of the raw (uncompressed) bytes of its frames, in order.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

DIGEST_SIZE: Final = 32
LEAF_NUMEL: Final = 2**20
"""Elements of a leaf of a tree digest: 4 MiB, so that a shard can check its own piece of a large fragment."""
_DELTA_DOMAIN: Final = b"skerry.delta.v1\0"
_TREE_DOMAIN: Final = b"skerry.tree.v1\0"
_RANGE: Final = struct.Struct("<QQ")
_COUNT: Final = struct.Struct("<Q")


def delta_digest(parts: Sequence[tuple[int, int, bytes]]) -> bytes:
    """Return the digest of a delta from its parts' `(first, numel, digest)`, which may come in any order.

    Raises:
        ValueError: a digest is not 32 bytes, or parts overlap.
    """
    hasher = blake3(_DELTA_DOMAIN)
    end = 0
    for first, numel, digest in sorted(parts):
        if len(digest) != DIGEST_SIZE or first < end:
            msg = (
                f"not a part that follows. first={first}, numel={numel}, digest_size={len(digest)}, previous_end={end}"
            )
            raise ValueError(msg)
        hasher.update(_RANGE.pack(first, numel) + digest)
        end = first + numel
    return hasher.digest()


def tree_leaves(values: NDArray[np.float32]) -> Iterator[bytes]:
    """Yield the digest of each 2^20 elements (the last may have fewer), from little-endian float32 bytes.

    Raises:
        ValueError: `values` is not contiguous, one-dimensional float32.
    """
    if values.dtype.str != "<f4" or values.ndim != 1 or not values.flags.c_contiguous:
        msg = f"values must be contiguous, one-dimensional float32. dtype={values.dtype}, shape={values.shape}"
        raise ValueError(msg)
    for first in range(0, len(values), LEAF_NUMEL):
        yield blake3(values[first : first + LEAF_NUMEL].view(np.uint8).data).digest()


def tree_root(numel: int, leaves: Sequence[bytes]) -> bytes:
    """Return the root over the leaves of all `numel` elements, in order.

    Raises:
        ValueError: there are not as many leaves as `numel` elements have.
    """
    if len(leaves) != -(-numel // LEAF_NUMEL):
        raise ValueError(f"wrong count of leaves. numel={numel}, leaves={len(leaves)}")
    return blake3(_TREE_DOMAIN + _COUNT.pack(numel) + b"".join(leaves)).digest()


def tree_digest(values: NDArray[np.float32]) -> bytes:
    """Return the digest of a fragment's values: of their exact bits, so -0.0 and 0.0 differ."""
    return tree_root(len(values), list(tree_leaves(values)))
