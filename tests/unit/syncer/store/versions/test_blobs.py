"""What a snapshot is written in."""

from __future__ import annotations

import numpy as np

from skerry.wire.safetensors import header_bytes
from skerry_syncer.store.objects.interface import STREAM_CHUNK_BYTES
from skerry_syncer.store.versions.blobs import snapshot_pieces


async def test_small_tensors_are_written_together_since_each_piece_takes_workers_time() -> None:
    tensors = {f"t{number:05}": np.full(170, number, np.float32) for number in range(2000)}
    tensors |= {f"u{number:05}": np.full(1, number, np.float32) for number in range(2000)}
    header, *pieces = [piece async for piece in snapshot_pieces("all", 3, "weights", tensors)]
    metadata = {"format": "1", "fragment": "all", "version": "3", "kind": "weights"}
    assert header == header_bytes({name: ("float32", values.shape) for name, values in tensors.items()}, metadata)
    assert b"".join(pieces) == b"".join(values.tobytes() for values in tensors.values())
    assert len(pieces) == 2 + 3  # of 771 tensors, and of 1024 at most
    assert min(map(len, pieces[:2])) >= STREAM_CHUNK_BYTES


async def test_a_large_tensor_is_written_in_pieces() -> None:
    values = np.arange(3 * STREAM_CHUNK_BYTES, dtype=np.float32)
    _, *pieces = [piece async for piece in snapshot_pieces("all", 3, "weights", {"one": values})]
    assert b"".join(pieces) == values.tobytes()
    assert max(map(len, pieces)) <= 2 * STREAM_CHUNK_BYTES
