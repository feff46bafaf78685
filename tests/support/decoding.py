"""Decodes a buffer of frames at once."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from skerry.wire import FragmentLayout
from skerry.wire.frames import FrameReader, decode_frame, parse_frames


def decode_frames(buffer: Any, layout: FragmentLayout, out: NDArray[np.float32], *, first: int = 0) -> None:
    """Writes the values of frames that must cover `[first, first + len(out))` in order."""
    reader = FrameReader(first, len(out))
    for batch in reader.feed(buffer):
        for frame in parse_frames(batch.data):
            decode_frame(frame, layout, out[frame.first - first : frame.first - first + frame.numel])
    reader.finish()
