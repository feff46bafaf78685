"""Plans the download of a fragment's version: the updates since the caller's version, or a snapshot and updates.

Pure: a plan follows from the folded run. Its objects are immutable, so a download may be resumed at any time, on any
replica, until a collection deletes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from skerry_syncer.errors import SyncerError
from skerry_syncer.store.log.entries import ObjectRef
from skerry_syncer.store.log.state import FragmentState, VersionState


@dataclass(frozen=True)
class PlanObject:
    """A snapshot or an update, and the version that the objects up to this one make."""

    ref: ObjectRef
    version: int
    is_snapshot: bool = False


@dataclass(frozen=True)
class PullPlan:
    """The objects that lead from a version to a target."""

    from_version: int  # -1: from a snapshot
    target: VersionState
    objects: tuple[PlanObject, ...]  # empty: the caller has the target

    @property
    def size_bytes(self) -> int:
        """The size of all objects."""
        return sum(part.ref.size_bytes for part in self.objects)


def plan_pull(fragment: FragmentState, gone: AbstractSet[str], *, from_version: int, target_version: int) -> PullPlan:
    """Returns the plan with the fewest bytes from `from_version` (-1: none) to `target_version`.

    Raises:
        SyncerError: VERSION_NOT_FOUND: the target does not exist, or its content was collected.
    """
    plans: list[PullPlan] = []
    for plan in _plans(fragment, gone, from_version, target_version):
        plans.append(plan)
        if from_version < 0 or plan.from_version >= 0 or plan.objects[0].version <= from_version:
            break  # every other plan has all of its updates, and more
    if not plans:
        raise SyncerError(
            "VERSION_NOT_FOUND", f"content was collected. fragment={fragment.layout.name}, version={target_version}"
        )
    return min(plans, key=lambda plan: (plan.size_bytes, -plan.from_version))  # of equal sizes the updates


def resume_plan(
    fragment: FragmentState, gone: AbstractSet[str], names: Sequence[str], *, from_version: int, target_version: int
) -> PullPlan:
    """Returns the plan that has the objects of these names, as long as they exist.

    Raises:
        SyncerError: VERSION_NOT_FOUND: the target is unknown; PLAN_EXPIRED: there is no such plan any more.
    """
    for plan in _plans(fragment, gone, from_version, target_version):
        if [planned.ref.name for planned in plan.objects] == names:
            return plan
    raise SyncerError("PLAN_EXPIRED", "the plan's objects were collected; ask for a new plan")


def _plans(
    fragment: FragmentState, gone: AbstractSet[str], from_version: int, target_version: int
) -> Iterator[PullPlan]:
    """Yields all ways to the target, those with the fewest updates first.

    No updates start from a version that a roll-back abandoned; a caller that has one gets a snapshot. Objects whose
    names are in `gone` were collected.
    """
    if target_version not in fragment.versions:
        facts = f"fragment={fragment.layout.name}, version={target_version}, newest={fragment.version}"
        raise SyncerError("VERSION_NOT_FOUND", f"no such version. {facts}")
    target = version = fragment.versions[target_version]
    updates: tuple[PlanObject, ...] = ()
    while True:
        if version.version == from_version:
            yield PullPlan(from_version, target, updates)
        if version.weights and gone.isdisjoint(ref.name for ref in version.weights):
            snapshot = (PlanObject(ref, version.version, is_snapshot=True) for ref in version.weights)
            yield PullPlan(-1, target, (*snapshot, *updates))
        update = () if version.commit is None else version.commit.commit.update  # none if a snapshot made the version
        before = fragment.versions.get(version.version - 1)
        if not update or before is None or not gone.isdisjoint(ref.name for ref in update):
            return
        updates = (*(PlanObject(ref, version.version) for ref in update), *updates)
        version = before
