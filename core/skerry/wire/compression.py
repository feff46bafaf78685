"""Decompresses one frame's bytes (zstd), with every allocation bounded by the size that its header declares."""

from __future__ import annotations

import threading

import zstandard

from skerry.wire.errors import FrameError, WireReason

_thread = threading.local()


def _decompressor() -> zstandard.ZstdDecompressor:
    """Return this thread's decompressor. Threads can't share one, and making one takes longer than a small frame."""
    try:
        decompressor: zstandard.ZstdDecompressor = _thread.decompressor
    except AttributeError:
        decompressor = _thread.decompressor = zstandard.ZstdDecompressor()
    return decompressor


def decompress_exactly(payload: bytes | memoryview, size: int) -> bytes:
    """Return `payload` decompressed, which must come to `size` bytes; never allocates more than that.

    Raises:
        FrameError: BOMB when it declares or comes to another size; CORRUPT when it is not one whole zstd frame.
    """
    try:
        declared = zstandard.frame_content_size(payload)
    except zstandard.ZstdError as error:
        raise FrameError(WireReason.CORRUPT, "payload has no zstd frame header") from error
    if declared != size:
        # Checked first, because the library allocates what the payload declares.
        msg = f"payload declares another size. expected={size}, declared={declared}"
        raise FrameError(WireReason.BOMB, msg)
    try:
        raw = _decompressor().decompress(payload, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FrameError(WireReason.CORRUPT, "payload is not one whole zstd frame") from error
    if len(raw) != size:
        msg = f"payload came to another size. expected={size}, actual={len(raw)}"
        raise FrameError(WireReason.BOMB, msg)
    return raw
