"""Plans the download of a fragment's version: the updates since the caller's version, or a snapshot and updates.

Pure: a plan follows from the folded run. Its objects are immutable, so a download may be resumed at any time, on any
replica, until a collection deletes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import StrEnum

from skerry_syncer.errors import SyncerError, bad_request
from skerry_syncer.store.log.entries import ObjectRef
from skerry_syncer.store.log.state import FragmentState, VersionState


class ObjectKind(StrEnum):
    """The content of a plan's object."""

    SNAPSHOT = "snapshot"
    UPDATE = "update"


@dataclass(frozen=True)
class PlanObject:
    """One object of a plan, and the version that the objects up to this one make."""

    ref: ObjectRef
    kind: ObjectKind
    version: int


@dataclass(frozen=True)
class PullPlan:
    """The objects that lead from a version to a target."""

    from_version: int  # -1: from a snapshot
    target: VersionState
    objects: tuple[PlanObject, ...]  # empty: the caller has the target

    @property
    def size_bytes(self) -> int:
        """The size of all objects."""
        return sum(one.ref.size_bytes for one in self.objects)


@dataclass(frozen=True)
class Resume:
    """An earlier plan's objects, and where its download stopped."""

    names: tuple[str, ...]
    object_index: int
    offset: int


def plan_pull(fragment: FragmentState, gone: AbstractSet[str], *, from_version: int, target_version: int) -> PullPlan:
    """Returns the plan with the fewest bytes from `from_version` (-1: none) to `target_version`.

    No updates start from a version that a roll-back abandoned; a caller that has one gets a snapshot. Objects whose
    names are in `gone` were collected.

    Raises:
        SyncerError: VERSION_NOT_FOUND: the target does not exist, or its content was collected.
    """
    target = fragment.versions.get(target_version)
    if target is None:
        raise SyncerError(
            "VERSION_NOT_FOUND",
            f"no such version. fragment={fragment.layout.name}, version={target_version}, newest={fragment.version}",
        )
    if from_version == target_version:
        return PullPlan(from_version, target, ())
    plans = [
        plan
        for plan in (_from_updates(fragment, gone, from_version, target), _from_snapshot(fragment, gone, target))
        if plan is not None
    ]
    if not plans:
        raise SyncerError(
            "VERSION_NOT_FOUND",
            f"content was collected. fragment={fragment.layout.name}, version={target_version}",
        )
    return min(plans, key=lambda plan: plan.size_bytes)  # of equal sizes the first: updates


def _from_updates(
    fragment: FragmentState, gone: AbstractSet[str], from_version: int, target: VersionState
) -> PullPlan | None:
    objects: list[PlanObject] = []
    version = target
    while version.version > max(from_version, 0):
        step = _update_of(version, gone)
        if step is None:
            return None
        objects[:0] = step
        before = fragment.versions.get(version.version - 1)
        if before is None:
            return None
        version = before
    return PullPlan(from_version, target, tuple(objects)) if version.version == from_version else None


def _from_snapshot(fragment: FragmentState, gone: AbstractSet[str], target: VersionState) -> PullPlan | None:
    objects: list[PlanObject] = []
    version = target
    while not version.weights or not gone.isdisjoint(ref.name for ref in version.weights):
        step = _update_of(version, gone)
        if step is None:
            return None
        objects[:0] = step
        before = fragment.versions.get(version.version - 1)
        if before is None:
            return None
        version = before
    snapshot = [PlanObject(ref, ObjectKind.SNAPSHOT, version.version) for ref in version.weights]
    return PullPlan(-1, target, (*snapshot, *objects))


def _update_of(version: VersionState, gone: AbstractSet[str]) -> list[PlanObject] | None:
    """Returns the objects of the update that made `version`; None if it has none, or they were collected."""
    if version.commit is None:
        return None
    refs = version.commit.commit.update
    if not gone.isdisjoint(ref.name for ref in refs):
        return None
    return [PlanObject(ref, ObjectKind.UPDATE, version.version) for ref in refs]


def resume_plan(
    fragment: FragmentState, gone: AbstractSet[str], resume: Resume, *, from_version: int, target_version: int
) -> PullPlan:
    """Returns the earlier plan whose objects `resume` names.

    Raises:
        SyncerError: PLAN_EXPIRED: an object was collected, or belongs to another fragment; VERSION_NOT_FOUND;
            BAD_REQUEST.
    """
    target = fragment.versions.get(target_version)
    if target is None:
        raise SyncerError(
            "VERSION_NOT_FOUND", f"no such version. fragment={fragment.layout.name}, version={target_version}"
        )
    if not resume.names and from_version != target_version:
        raise bad_request("resume names none of the plan's objects")
    if len(set(resume.names)) < len(resume.names):
        raise bad_request("resume names an object twice")
    objects = _named_objects(fragment, target, resume.names)
    if objects is None or any(one.ref.name in gone for one in objects):
        raise SyncerError("PLAN_EXPIRED", "the plan's objects were collected; ask for a new plan")
    if not 0 <= resume.object_index <= len(objects) or resume.offset < 0:
        raise bad_request(f"resume is outside the plan. object_index={resume.object_index}, offset={resume.offset}")
    if resume.object_index < len(objects) and resume.offset > objects[resume.object_index].ref.size_bytes:
        raise bad_request(f"resume is outside its object. offset={resume.offset}")
    starts_with_snapshot = bool(objects) and objects[0].kind is ObjectKind.SNAPSHOT
    return PullPlan(-1 if starts_with_snapshot else from_version, target, tuple(objects))


def _named_objects(fragment: FragmentState, target: VersionState, names: Sequence[str]) -> list[PlanObject] | None:
    """Returns the objects of these names, searched from the target backwards; None if one is not found."""
    wanted = set(names)
    found: dict[str, PlanObject] = {}
    version: VersionState | None = target
    while version is not None and len(found) < len(wanted):
        steps = [PlanObject(ref, ObjectKind.SNAPSHOT, version.version) for ref in version.weights]
        steps += _update_of(version, set()) or []
        found.update((one.ref.name, one) for one in steps if one.ref.name in wanted)
        version = fragment.versions.get(version.version - 1)
    return [found[name] for name in names] if len(found) == len(wanted) else None
