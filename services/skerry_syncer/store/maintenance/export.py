"""Writes a checkpoint of a run as of any log position: one safetensors file with the tensors that the run trains.

What else the model has comes from files that the caller names: `skerry.wire.base_model`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, Literal

from skerry.runtime.files import replacing
from skerry.runtime.workers import Workers
from skerry.wire.base_model import BaseModel
from skerry.wire.safetensors import checkpoint_header, tensor_bytes
from skerry_syncer.store.errors import LogCorruptError, ObjectMissingError
from skerry_syncer.store.log.entries import INITIAL_BASE, ObjectRef
from skerry_syncer.store.log.fold import apply_entry
from skerry_syncer.store.log.run_log import RunLog
from skerry_syncer.store.log.state import FragmentState, RunState, VersionState
from skerry_syncer.store.maintenance.log_lines import time_text
from skerry_syncer.store.versions.replay import Replayer

ExportDtype = Literal["original", "float32"]
_NAMED_SPANS: Final = 8  # of positions, in a message


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
    base: BaseModel | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, int]:
    """Writes the run's weights at `position`, and the tensors of `base`, to `path`; returns the versions by fragment.

    Needs memory for the largest fragment. The file appears when complete. `progress` gets (elements done, in all).

    Raises:
        ObjectMissingError: there is no such position, or what it takes was collected.
        LogCorruptError: the weights do not have the digests that the log names.
        OSError: `path` can't be written, or a file of `base` not read.
    """
    base = base or BaseModel(log.spec.untrained, log.spec.dtypes)
    before, behind = base.wide(is_wide=True), base.wide(is_wide=False)
    versions = await versions_at(log, position)
    await _check_not_collected(log, position, versions)
    header, dtypes = checkpoint_header(
        {t.name: (log.spec.dtypes[t.name], t.shape) for layout in log.spec.fragments for t in layout.tensors},
        before={name: one.place for name, one in before.items()},
        behind={name: one.place for name, one in behind.items()},
        dtype=dtype,
        run=log.spec.name,
        uid=log.spec.uid,
        position=position,
        versions=versions,
    )
    total = sum(layout.numel for layout in log.spec.fragments)
    done = 0
    with replacing(path) as file:

        async def copy(names: Iterable[str]) -> None:
            for name in names:
                for piece in base.pieces(name):
                    await workers.run(file.write, piece)

        file.write(header)
        await copy(before)
        for layout in log.spec.fragments:
            try:
                weights = await Replayer(log, layout.name, workers).weights_at(versions[layout.name])
            except ObjectMissingError:  # a collection took them meanwhile
                await _check_not_collected(log, position, versions)
                raise
            for spec, offset in zip(layout.tensors, layout.offsets, strict=True):
                values = weights[offset : offset + spec.numel]
                for chunk in tensor_bytes(values, dtypes[spec.name]):
                    await workers.run(file.write, chunk)
            done += layout.numel
            if progress is not None:
                progress(done, total)
        await copy(behind)
    return versions


def exportable_positions(state: RunState) -> list[range]:
    """Returns the spans of positions at which every fragment has weights that no collection took."""
    whole = {name: _whole_versions(state, fragment) for name, fragment in state.fragments.items()}
    changes = sorted(
        (version.position, name, version.version)
        for name, fragment in state.fragments.items()
        for version in fragment.versions.values()
    )
    newest: dict[str, int] = {}
    spans: list[range] = []
    for nth, (position, name, version) in enumerate(changes):
        newest[name] = version
        stop = changes[nth + 1][0] if nth + 1 < len(changes) else state.position + 1
        if len(newest) == len(whole) and all(newest[name] in whole[name] for name in newest):
            begin = spans.pop().start if spans and spans[-1].stop == position else position
            spans.append(range(begin, stop))
    return [span for span in spans if span]


def _whole_versions(state: RunState, fragment: FragmentState) -> set[int]:
    whole: set[int] = set()
    for number, at in sorted(fragment.versions.items()):
        if _has(state, at.weights) or (number - 1 in whole and _has(state, update_of(at))):
            whole.add(number)
    return whole


def _has(state: RunState, refs: Sequence[ObjectRef]) -> bool:
    return bool(refs) and state.condemned.isdisjoint(ref.name for ref in refs)


def update_of(at: VersionState) -> tuple[ObjectRef, ...]:
    """Returns the objects of the update that made a version; none if a snapshot made it."""
    return () if at.commit is None else at.commit.commit.update


async def _check_not_collected(log: RunLog, position: int, versions: dict[str, int]) -> None:
    """Refuses versions whose objects were collected, and says which collection it was and what can be exported."""
    state = log.state
    for name, version in versions.items():
        fragment = state.fragments[name]
        if version in _whole_versions(state, fragment):
            continue
        at = fragment.versions[version]
        while _has(state, update_of(at)):
            at = fragment.versions[at.version - 1]
        spans = exportable_positions(state)[-_NAMED_SPANS:]
        raise ObjectMissingError(
            f"weights at that position were collected. position={position}, fragment={name}, version={version}, "
            f"collected_by={await _collection_of(log, {ref.name for ref in (*at.weights, *update_of(at))})}, "
            f"positions_left={', '.join(f'{span[0]} to {span[-1]}' for span in spans) or 'none'}"
        )


async def _collection_of(log: RunLog, names: set[str]) -> str:
    """Returns, in words, the entry that condemned the last of these objects."""
    position = max(at for name, at in log.state.condemned_at.items() if name in names)
    async for entry, _ in log.entries(position, position + 1):
        return f"the entry at position {position} of {time_text(entry.written_at_unix_s)}"
    return "an entry that is not in the log any more"
