"""Error feedback: what quantisation drops from one message is added to the next, so that in the sum nothing is lost.

    intended_t = delta_t + residual_(t-1)
    sent_t     = decode(encode(intended_t))
    residual_t = intended_t - sent_t

A sender whose message is refused drops nothing: it goes on with `intended_t` as its residual (see `restored`).
A learner that adopts by rebase needs none of this: what was dropped is still in its weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from skerry.wire.frames import encode_frames

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from skerry.wire.codecs import Encoding
    from skerry.wire.digests import Hasher
    from skerry.wire.layout import FragmentLayout


def encode_with_feedback(
    delta: NDArray[np.float32],  # (numel of the range,) overwritten with what the receiver decodes
    residual: NDArray[np.float32],  # (numel of the range,) overwritten with the next message's residual
    layout: FragmentLayout,
    encoding: Encoding,
    *,
    first: int = 0,
    digest: Hasher | None = None,
) -> list[bytes]:
    """Return the frames of `delta + residual`; both arrays are updated in place, so no third one is needed.

    Raises:
        ValueError: as `encode_frames`; nothing is changed.
        NonFiniteError: `delta + residual` holds what cannot be encoded; then both arrays are of no use.
    """
    if delta.shape != residual.shape:
        msg = f"delta and residual differ in shape. delta={delta.shape}, residual={residual.shape}"
        raise ValueError(msg)
    frames = encode_frames(residual, layout, encoding, first=first, decoded=delta, digest=digest)
    np.add(residual, delta, out=residual)
    encoded = list(frames)
    np.subtract(residual, delta, out=residual)
    return encoded


def restored(residual: NDArray[np.float32], sent: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the residual with a refused message's content put back (exactly `intended`, up to one rounding)."""
    return residual + sent
