"""What snapshots are written in, and how the parts of a delta are found again."""

from __future__ import annotations

import numpy as np
import pytest

from skerry.wire.safetensors import header_bytes
from skerry_syncer.store.errors import ObjectMissingError
from skerry_syncer.store.log.entries import CollectedItem
from skerry_syncer.store.objects.interface import STREAM_CHUNK_BYTES
from skerry_syncer.store.versions.blobs import snapshot_pieces
from tests.support.log_bench import SPEC, Bench, on_virtual_time


async def test_small_tensors_are_written_together_since_each_piece_takes_workers_time() -> None:
    tensors = {f"t{number:05}": np.full(170, number, np.float32) for number in range(2000)}
    tensors |= {f"u{number:05}": np.full(1, number, np.float32) for number in range(2000)}
    header, *pieces = [piece async for piece in snapshot_pieces("all", 3, "weights", tensors)]
    metadata = {"format": "1", "fragment": "all", "version": "3", "kind": "weights"}
    assert header == header_bytes({name: ("float32", values.shape) for name, values in tensors.items()}, metadata)
    assert b"".join(pieces) == b"".join(values.tobytes() for values in tensors.values())
    assert len(pieces) == 3  # the first two of 771 tensors
    assert min(map(len, pieces[:2])) >= STREAM_CHUNK_BYTES


async def test_a_large_tensor_is_written_in_pieces() -> None:
    values = np.arange(3 * STREAM_CHUNK_BYTES, dtype=np.float32)
    _, *pieces = [piece async for piece in snapshot_pieces("all", 3, "weights", {"one": values})]
    assert b"".join(pieces) == values.tobytes()
    assert max(map(len, pieces)) <= 2**20


@on_virtual_time
async def test_parts_are_listed_once_each_and_without_condemned_ones(bench: Bench) -> None:
    run = await bench.store().create_draft(SPEC)
    delta, digest = "c" * 32, "0" * 64
    first_part = await run.blobs.write_part("body", delta, 0, 2, digest, [1.5], [b"one"])
    await run.blobs.write_part("body", delta, 0, 2, digest, [1.5], [b"one"])
    second = await run.blobs.write_part("body", delta, 2, 2, digest, [0.1], [b"\ntwo\n", b"three"])
    listed = await run.blobs.list_parts("body", delta)
    assert [(part.ref.first, part.squared_norms) for part in listed] == [(0, (1.5,)), (2, (0.1,))]
    assert b"".join([piece async for piece in run.blobs.part_frames(second.ref)]) == b"\ntwo\nthree"
    await run.log.append([CollectedItem((second.ref.name,))])
    assert [part.ref.first for part in await run.blobs.list_parts("body", delta)] == [0]
    await bench.shared.delete([f"{run.log.prefix}/{first_part.ref.name}"])
    with pytest.raises(ObjectMissingError):
        _ = [piece async for piece in run.blobs.part_frames(first_part.ref)]
