"""The outer states that one replica keeps of a run: a cache.

A snapshot may be reading a fragment's state when the next version is due. That version is then written to a copy, so
that no merge waits for a slow store.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np

from skerry.algorithm.step import OuterState
from skerry.runtime.logs import get_logger
from skerry_syncer.store.log.state import FragmentState
from skerry_syncer.store.versions.replay import DAMAGE, Replayer
from skerry_syncer.store.versions.run import Run
from skerry_syncer.store.versions.scratch import Scratch

_LOG: Final = get_logger(__name__)


@dataclass
class _Cached:
    """A fragment's outer state of a version that the log has."""

    outer: OuterState | None  # None: scratch had no space for it any more

    def let_go(self) -> None:
        """Drops the state."""
        self.outer = None


class OuterStates:
    """One outer state a fragment, at most. One task at a time may use a fragment's; one more may read it."""

    def __init__(self, run: Run, scratch: Scratch) -> None:
        """Starts with nothing cached."""
        self._run = run
        self._scratch = scratch
        self._cache: dict[str, _Cached] = {}
        self._reading: dict[str, OuterState] = {}  # by fragment: what a snapshot is made of

    async def take(self, fragment: FragmentState, version: int) -> OuterState:
        """Returns the outer state of `version`, which its caller may change: it is not in the cache any more."""
        name = fragment.layout.name
        replayer = Replayer(self._run, name)
        cached = self._cache.pop(name, None)
        outer = cached.outer if cached is not None else None
        if outer is not None and outer.version <= version:
            try:
                outer = await self._writable(name, outer)
                await replayer.advance(outer, version, self._scratch)
            except DAMAGE as error:  # a snapshot that is nearer may lead there
                _LOG.warning("cached state is dropped", fragment=name, version=version, cause=str(error))
            else:
                return outer
        cached = outer = None  # so that their scratch space is free
        return await replayer.rebuild(version, self._scratch)

    def keep(self, name: str, outer: OuterState) -> None:
        """Caches a fragment's outer state, of a version that the log has, while there is space."""
        self._cache[name] = cached = _Cached(outer)
        self._scratch.may_drop(cached)

    async def _writable(self, name: str, outer: OuterState) -> OuterState:
        """Returns a copy of the state while another task reads it, else the state."""
        if self._reading.get(name) is not outer:
            return outer
        weights, momentum, residual = self._scratch.zeros(3, len(outer.weights))
        for copy, array in ((weights, outer.weights), (momentum, outer.momentum), (residual, outer.residual)):
            await self._run.workers.run(np.copyto, copy, array)
        return OuterState(weights, momentum, residual, outer.version)

    @contextmanager
    def reading(self, fragment: FragmentState) -> Iterator[OuterState | None]:
        """Yields the outer state of the fragment's newest version, which does not change while the context lasts.

        Yields None if that is not cached, or if another task reads a state of the fragment already.
        """
        name = fragment.layout.name
        cached = self._cache.get(name)
        outer = cached.outer if cached is not None else None
        if name in self._reading or outer is None or outer.version != fragment.version:
            yield None
            return
        self._reading[name] = outer
        try:
            yield outer
        finally:
            del self._reading[name]
