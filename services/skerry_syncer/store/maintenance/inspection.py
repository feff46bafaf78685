"""Compares single objects of a run with what its log says of them."""

from __future__ import annotations

from blake3 import blake3

from skerry.runtime.workers import Workers
from skerry.wire.frames import parse_frames, raw_bytes
from skerry_syncer.store.errors import LogCorruptError
from skerry_syncer.store.log.entries import ObjectRef
from skerry_syncer.store.log.run_log import RunLog
from skerry_syncer.store.versions.blobs import frame_batches
from skerry_syncer.store.versions.run import Run


async def object_digest(run: Run, ref: ObjectRef, workers: Workers) -> str:
    """Returns the digest of a stored object that must be `ref.digest`: of a part's raw frames, else of all its bytes.

    Raises:
        ObjectMissingError: there is no such object.
        FrameError, UnreadableObjectError: it is no part, so it has no such digest.
    """
    if ref.name.startswith("deltas/"):
        hasher = blake3()
        async for batch in frame_batches(run.blobs.part_frames(ref), ref.first, ref.numel):
            await workers.run(_hash_raw, hasher, batch.data)
        return hasher.digest().hex()
    whole = blake3()
    async for piece in run.blobs.read(ref):
        await workers.run(whole.update, piece)
    return whole.hexdigest()


def _hash_raw(hasher: blake3, data: bytes | memoryview) -> None:
    for frame in parse_frames(data):
        hasher.update(raw_bytes(frame))


async def last_stored_position(log: RunLog) -> int:
    """Returns the highest number in the folder of the log's entries, by a listing; 0 if there is none."""
    numbers = [info.name.rpartition("/")[2] async for info in log.objects.list(f"{log.prefix}/log")]
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


async def what_is_wrong_after(log: RunLog) -> str | None:
    """Returns why the log can't be followed beyond `log.state`, or None at its end; folds what is new.

    Raises:
        StoreUnavailableError: the store can't be read.
    """
    stored = await last_stored_position(log)
    if log.failure is None:
        try:
            await log.tail()
        except LogCorruptError as error:
            return str(error)
    if log.failure is not None:
        return str(log.failure)
    if log.state.position < stored:
        return f"log entry is missing. position={log.state.position + 1}, last={stored}"
    return None
