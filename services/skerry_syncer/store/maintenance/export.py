"""The weights that a store has of a run at a position of its log, for `skerry export`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager

import numpy as np
from numpy.typing import NDArray

from skerry.v1.types_pb2 import FragmentVersion, Run
from skerry.wire.messages import layouts_to_messages, untrained_to_messages
from skerry_syncer.store.errors import ObjectMissingError
from skerry_syncer.store.log.entries import RunSpec
from skerry_syncer.store.log.state import RunState
from skerry_syncer.store.maintenance.options import opened_run, warn_of_damage
from skerry_syncer.store.versions.replay import Replayer

Pull = Callable[[Callable[[int, int], None]], Iterator[tuple[str, NDArray[np.float32]]]]


@contextmanager
def stored_weights(
    store_url: str, name: str, uid: str | None, position: int | None
) -> Iterator[tuple[Run, Pull, bool]]:
    """Yields a run at a position, what yields its tensors, and whether it is cut short by a damaged log.

    Without a position it is the run at its log's end, or at its last good entry. The tensors come in the order of the
    plan, one fragment in memory at a time, for a function that is called with (elements read, in all).

    Raises:
        ObjectMissingError: the log has no such position, the run had no weights then, or they were collected.
    """
    stack = AsyncExitStack()
    with asyncio.Runner() as runner:
        try:
            run = runner.run(stack.enter_async_context(opened_run(store_url, name, uid)))
            log = run.log
            shown_position = log.state.position if position is None else position
            versions = _versions_at(log.state, shown_position)

            def pull(progress: Callable[[int, int], None]) -> Iterator[tuple[str, NDArray[np.float32]]]:
                done, total = 0, sum(layout.numel for layout in log.spec.fragments)
                for layout in log.spec.fragments:
                    weights = runner.run(Replayer(run, layout.name).weights_at(versions[layout.name]))
                    done += layout.numel
                    progress(done, total)
                    yield from layout.pieces(weights)

            is_cut = position is None and warn_of_damage(log.failure, shown_position)
            yield _record(log.spec, versions, shown_position), pull, is_cut
        finally:
            runner.run(stack.aclose())


def _versions_at(state: RunState, position: int) -> dict[str, int]:
    """Returns the newest version of each fragment after the entry at `position`, by fragment."""
    if not 0 <= position <= state.position:
        raise ObjectMissingError(f"log has no such position. position={position}, end={state.position}")
    versions = {}
    for name, fragment in state.fragments.items():
        version = fragment.at(position)
        if version is None:
            raise ObjectMissingError(f"run has no weights at that position. fragment={name}, position={position}")
        versions[name] = version.version
    return versions


def _record(spec: RunSpec, versions: dict[str, int], position: int) -> Run:
    tensors, fragments = layouts_to_messages(spec.fragments, spec.dtypes)
    return Run(
        name=spec.name,
        uid=spec.uid,
        tensors=tensors,
        fragments=fragments,
        versions=[FragmentVersion(fragment=name, version=version) for name, version in versions.items()],
        position=position,
        untrained=untrained_to_messages(spec.untrained),
    )
