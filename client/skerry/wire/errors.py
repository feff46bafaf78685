"""The errors of values that can't be sent and of received bytes that are wrong.

    WireError                    every error of this package; `reason` is stable and append-only
    ├── NonFiniteError           the caller's own values cannot be sent: repair or replace the tensor that it names
    ├── FrameError               received frames are damaged or wrong: refuse them and ask for them again
    └── TensorFileError          so is a received safetensors file

A bad argument (wrong dtype, a range that is not cut at a block) is a `ValueError`, because no peer can cause it.
"""

from __future__ import annotations

from enum import StrEnum


class WireReason(StrEnum):
    """Why, for programs. Members are only ever added: peers match on the values."""

    NON_FINITE = "NON_FINITE"
    """A value is NaN, infinite or too large for the codec."""
    TRUNCATED = "TRUNCATED"
    """The bytes end inside a frame, or before the range that they must cover does."""
    CHECKSUM = "CHECKSUM"
    """The CRC-32 of header and payload is not the declared one."""
    BAD_HEADER = "BAD_HEADER"
    """A header field has a value that no encoder writes."""
    TOO_LARGE = "TOO_LARGE"
    """A frame claims more elements or bytes than a frame may hold."""
    BOMB = "BOMB"
    """The payload does not decompress to exactly the size that codec, layout and element count imply."""
    LAYOUT = "LAYOUT"
    """The frame's range does not fit the fragment, its blocks, or the range that was announced."""
    CORRUPT = "CORRUPT"
    """The payload is not a whole zstd frame, though its checksum holds."""
    BAD_SCALE = "BAD_SCALE"
    """A block's scale is negative, or outside the range that encoders write."""


class WireError(Exception):
    """Base of this package's errors; carries a stable `reason`."""

    def __init__(self, reason: WireReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class NonFiniteError(WireError):
    """A tensor holds NaN, an infinity, or a magnitude above what its codec carries; the message names the first one."""


class FrameError(WireError):
    """Received bytes are not the frames that they should be."""


class TensorFileError(WireError):
    """Received bytes are not the safetensors file that they should be: BAD_HEADER, TOO_LARGE, LAYOUT or TRUNCATED."""
