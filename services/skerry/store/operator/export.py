"""Writes a checkpoint of a run as of any log position: one safetensors file with every tensor of the model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from skerry.runtime.workers import Workers
from skerry.store.errors import LogCorruptError, ObjectMissingError
from skerry.store.log.entries import INITIAL_BASE, RunSpec
from skerry.store.log.fold import apply_entry
from skerry.store.log.run_log import RunLog
from skerry.store.log.state import RunState
from skerry.store.versions.replay import Replayer
from skerry.wire.safetensors import WRITABLE_DTYPES, header_bytes, tensor_bytes

ExportDtype = Literal["original", "float32"]


async def versions_at(log: RunLog, position: int) -> dict[str, int]:
    """Returns the newest version of each fragment after the entry at `position`, by fragment in plan order.

    Raises:
        ObjectMissingError: the log ends before it, or the run had no weights yet.
        LogCorruptError: the log can't be read.
    """
    if not 0 <= position <= log.state.position:
        raise ObjectMissingError(f"log has no such position. position={position}, end={log.state.position}")
    state = RunState(log.spec)
    async for entry, data in log.entries(stop=position + 1):
        apply_entry(state, entry, data)
    if state.position != position:
        raise LogCorruptError(f"the log is shorter than when it was opened. position={position}, end={state.position}")
    versions = {layout.name: state.fragments[layout.name].version for layout in log.spec.fragments}
    if INITIAL_BASE in versions.values():
        raise ObjectMissingError(f"run has no weights at that position. position={position}")
    return versions


async def export_checkpoint(
    log: RunLog,
    path: Path,
    *,
    position: int,
    dtype: ExportDtype,
    workers: Workers,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, int]:
    """Writes the run's weights at `position` to `path` and returns the versions in it, by fragment.

    Needs memory for the largest fragment. The file appears when complete. `progress` gets (elements done, in all).

    Raises:
        ObjectMissingError: there is no such position, or what it takes was collected.
        LogCorruptError: the weights do not have the digests that the log names.
    """
    versions = await versions_at(log, position)
    dtypes = _written_dtypes(log.spec, dtype)
    header = header_bytes(
        {t.name: (dtypes[t.name], t.shape) for layout in log.spec.fragments for t in layout.tensors},
        {
            "format": "pt",  # loaders of model files expect it
            "run": log.spec.name,
            "uid": log.spec.uid,
            "position": str(position),
            "versions": json.dumps(versions),
        },
    )
    partial = path.with_name(f"{path.name}.partial")
    total = sum(layout.numel for layout in log.spec.fragments)
    done = 0
    try:
        with partial.open("wb") as file:
            file.write(header)
            for layout in log.spec.fragments:
                weights = await Replayer(log, layout.name, workers).weights_at(versions[layout.name])
                for spec, offset in zip(layout.tensors, layout.offsets, strict=True):
                    values = weights[offset : offset + spec.numel]
                    for chunk in tensor_bytes(values, dtypes[spec.name]):
                        await workers.run(file.write, chunk)
                done += layout.numel
                if progress is not None:
                    progress(done, total)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return versions


def _written_dtypes(spec: RunSpec, dtype: ExportDtype) -> dict[str, str]:
    if dtype == "float32":
        return dict.fromkeys(spec.dtypes, "float32")
    return {name: own if own in WRITABLE_DTYPES else "float32" for name, own in spec.dtypes.items()}
