"""What the collections of a run took: only what nobody needs, only after it was condemned, and never what stays."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from collections.abc import Set as AbstractSet
from typing import Final

from skerry_syncer.store.log.entries import CollectedItem, Item, entry_name
from skerry_syncer.store.log.state import FragmentState, RunState
from skerry_syncer.store.versions.replay import DAMAGE, Replayer
from skerry_syncer.store.versions.run import Run
from skerry_syncer.store.versions.scratch import Scratch
from tests.simulation.evidence import Evidence
from tests.support.dict_objects import DictObjects

_ROUNDED_S: Final = 0.001  # of the times that two entries say


def needed_names(state: RunState, gone: AbstractSet[str]) -> set[str]:
    """Returns what a replica without memory takes to go on from here, by the log alone and not by the product's rule.

    What was `gone` before is not among it.
    """
    names = set()
    for fragment in state.fragments.values():
        frozen = fragment.closing.members if fragment.closing else ()
        for delta in (*fragment.pending, *(member.delta for member in frozen)):
            names.update(_parts(state, delta))
        names |= _names_to_rebuild(state, fragment, gone)
    return names


def _names_to_rebuild(state: RunState, fragment: FragmentState, gone: AbstractSet[str]) -> set[str]:
    names: set[str] = set()
    for number in range(fragment.version, -1, -1):
        version = fragment.versions[number]
        snapshot = {ref.name for ref in (*version.weights, *version.outer)}
        if version.weights and not snapshot & gone:
            return names | snapshot
        if version.commit is not None:
            names |= {ref.name for ref in version.commit.commit.update}
            names |= {name for member in version.commit.close.members for name in _parts(state, member.delta)}
    return names


def _parts(state: RunState, delta: str) -> list[str]:
    return [part.name for part in state.deltas[delta].item.parts]


class Collections:
    """Watches collections while the log is folded from its first entry."""

    def __init__(self, evidence: Evidence, run: Run) -> None:
        self._evidence = evidence
        self._run = run
        self._condemned_at: dict[str, int] = {}  # by name: the count of events when its entry landed

    def admitted(self, state: RunState, item: Item) -> Iterator[str]:
        """Yields what an admitted item takes that is needed; `state` is that after its entry."""
        if not isinstance(item, CollectedItem):
            return
        for name in sorted(needed_names(state, self._condemned_at.keys()).intersection(item.names)):
            yield f"position {state.position} took {name}"
        landed = self._evidence.landed[entry_name(self._run.log.prefix, state.position)]
        self._condemned_at.update({name: self._condemned_at.get(name, landed) for name in item.names})

    def too_early(self, state: RunState, item: Item) -> Iterator[str]:
        """Yields the weights that an item takes although they were the newest within the policy's hours.

        A version that has a snapshot does not need its update. Whoever's clock says something else: the time is the
        world's, when entries landed.
        """
        if not isinstance(item, CollectedItem) or not self._evidence.landed_at_s:
            return
        versions = [(fragment, one) for fragment in state.fragments.values() for one in fragment.versions.values()]
        made_s = [self._landed_at_s(one.position) for _, one in versions]
        since_s = max(made_s) - state.policy.kept_hours * 3600 + _ROUNDED_S
        for (fragment, version), at_s in zip(versions, made_s, strict=True):
            needed = {ref.name for ref in version.weights or version.weights_refs}
            if at_s >= since_s and not needed.isdisjoint(item.names):
                yield f"position {state.position} took {fragment.layout.name} version {version.version}"

    def _landed_at_s(self, position: int) -> float:
        return self._evidence.landed_at_s[entry_name(self._run.log.prefix, position)]

    @property
    def condemned(self) -> AbstractSet[str]:
        """Names of all blobs that a collection took."""
        return self._condemned_at.keys()

    def deletions(self) -> Iterator[str]:
        """Yields the blobs that were deleted before they were condemned, or never were."""
        for path, (_, count) in self._evidence.deleted.items():
            name = path.removeprefix(f"{self._run.log.prefix}/")
            if name.startswith(("deltas/", "snapshots/", "updates/")) and self._condemned_at.get(name, count) >= count:
                yield name

    async def losses(self) -> AsyncIterator[str]:
        """Yields versions that the policy keeps whole and that can't be rebuilt."""
        for name, fragment in self._run.state.fragments.items():
            replayer = Replayer(self._run, name)
            for version in range(fragment.version, fragment.version - self._run.state.policy.kept_version_count, -1):
                try:
                    if version in fragment.versions:
                        await replayer.rebuild(version, Scratch(None))
                except DAMAGE as error:
                    yield f"{name} version {version}: {error}"


def with_deleted(evidence: Evidence) -> DictObjects:
    """Returns all objects that ever were in the store."""
    objects = DictObjects()
    objects.objects.update({name: (data, 0.0) for name, (data, _) in evidence.deleted.items()})
    objects.objects.update(evidence.stored)
    return objects
