"""Decodes the frames of a part while they arrive, so that only sound parts are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from skerry.algorithm.merge import per_tensor_squared_norms
from skerry.syncer.errors import SyncerError, from_wire
from skerry.wire.codecs import MAX_FRAME_NUMEL, Codec
from skerry.wire.digests import part_digest
from skerry.wire.errors import FrameError
from skerry.wire.frames import Frame, FrameBatch, decode_frame, parse_frames
from skerry.wire.layout import FragmentLayout
from skerry.wire.messages import MAX_BLOCK, MIN_BLOCK

# Below this many bytes of frames, checking them takes less time than handing them to another thread.
INLINE_CHECK_BYTES: Final = 32 * 2**10


@dataclass(frozen=True)
class PartSummary:
    """What is known of a part whose every frame was decoded."""

    digest: bytes
    squared_norms: tuple[float, ...]  # |v_t|^2 restricted to the part, one a tensor


class PartChecker:
    """Decodes one part's frames, which a `FrameReader` cut; holds one frame's elements."""

    def __init__(self, layout: FragmentLayout, numel: int, *, codecs: frozenset[Codec]) -> None:
        """Expects a part of `numel` elements, each frame in one of `codecs`."""
        self._layout = layout
        self._codecs = codecs
        self._hasher = part_digest()
        self._norms: NDArray[np.float64] = np.zeros(len(layout.tensors), np.float64)
        self._decoded: NDArray[np.float32] = np.empty(min(numel, MAX_FRAME_NUMEL), np.float32)

    def check(self, batches: Sequence[FrameBatch]) -> None:
        """Decodes the frames that follow; slow enough for a worker thread, and for one at a time.

        Raises:
            SyncerError: BAD_FRAME, NON_FINITE, OUT_OF_RANGE, ENCODING_UNSUPPORTED.
        """
        try:
            for batch in batches:
                for frame in parse_frames(batch.data):
                    self._check(frame)
        except FrameError as error:
            raise from_wire(error) from error

    def summary(self) -> PartSummary:
        """Returns what is known once every frame was checked."""
        return PartSummary(self._hasher.digest(), tuple(self._norms.tolist()))

    def _check(self, frame: Frame) -> None:
        if frame.codec not in self._codecs or (frame.block and not MIN_BLOCK <= frame.block <= MAX_BLOCK):
            raise SyncerError(
                "ENCODING_UNSUPPORTED",
                f"encoding is not offered here. codec={frame.codec.value}, block={frame.block}, "
                f"codecs={sorted(codec.value for codec in self._codecs)}, blocks={MIN_BLOCK}..{MAX_BLOCK}",
            )
        out = decode_frame(frame, self._layout, self._decoded[: frame.numel], digest=self._hasher)
        self._norms += per_tensor_squared_norms(out, self._layout, frame.first)
