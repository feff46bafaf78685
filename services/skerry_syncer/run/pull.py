"""Plans the download of a fragment's version: the updates since the caller's version, or a snapshot and updates.

Pure: a plan follows from the folded run. Its objects are immutable, so a download may be resumed at any time, on any
replica, until a collection deletes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from skerry_syncer.errors import SyncerError, bad_request
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
    target = _version(fragment, target_version)
    if from_version == target_version:
        return PullPlan(from_version, target, ())
    plans: list[PullPlan] = []
    updates: list[PlanObject] = []
    has_snapshot, version = False, target
    while not has_snapshot or version.version > from_version >= 0:
        if version.weights and not has_snapshot and gone.isdisjoint(ref.name for ref in version.weights):
            has_snapshot = True
            plans.append(PullPlan(-1, target, (*_snapshot(version), *updates)))
        update, before = _update(version), fragment.versions.get(version.version - 1)
        if not update or before is None or not gone.isdisjoint(part.ref.name for part in update):
            break
        updates[:0] = update
        version = before
        if version.version == from_version:
            plans.insert(0, PullPlan(from_version, target, tuple(updates)))
    if not plans:
        raise SyncerError(
            "VERSION_NOT_FOUND", f"content was collected. fragment={fragment.layout.name}, version={target_version}"
        )
    return min(plans, key=lambda plan: plan.size_bytes)  # of equal sizes the first: updates


def resume_plan(
    fragment: FragmentState, gone: AbstractSet[str], resume: Resume, *, from_version: int, target_version: int
) -> PullPlan:
    """Returns an earlier plan again, as long as its objects exist.

    Raises:
        SyncerError: VERSION_NOT_FOUND: the target is unknown; PLAN_EXPIRED: an object is not there any more;
            BAD_REQUEST: `resume` does not fit its plan.
    """
    target = _version(fragment, target_version)
    if not resume.names and from_version != target_version:
        raise bad_request("resume names none of the plan's objects")
    if len(set(resume.names)) < len(resume.names):
        raise bad_request("resume names an object twice")
    objects = _named_objects(fragment, target, resume.names)
    if objects is None or any(part.ref.name in gone for part in objects):
        raise SyncerError("PLAN_EXPIRED", "the plan's objects were collected; ask for a new plan")
    if not 0 <= resume.object_index <= len(objects) or resume.offset < 0:
        raise bad_request(f"resume is outside the plan. object_index={resume.object_index}, offset={resume.offset}")
    if resume.object_index < len(objects) and resume.offset > objects[resume.object_index].ref.size_bytes:
        raise bad_request(f"resume is outside its object. offset={resume.offset}")
    starts_with_snapshot = bool(objects) and objects[0].is_snapshot
    return PullPlan(-1 if starts_with_snapshot else from_version, target, tuple(objects))


def _version(fragment: FragmentState, number: int) -> VersionState:
    if number not in fragment.versions:
        facts = f"fragment={fragment.layout.name}, version={number}, newest={fragment.version}"
        raise SyncerError("VERSION_NOT_FOUND", f"no such version. {facts}")
    return fragment.versions[number]


def _named_objects(fragment: FragmentState, target: VersionState, names: Sequence[str]) -> list[PlanObject] | None:
    """Returns the objects of these names, searched from the target backwards; None if one is not there."""
    objects: dict[str, PlanObject] = {}
    version: VersionState | None = target
    while version is not None and not objects.keys() >= set(names):
        objects.update((part.ref.name, part) for part in (*_snapshot(version), *_update(version)))
        version = fragment.versions.get(version.version - 1)
    return [objects[name] for name in names] if objects.keys() >= set(names) else None


def _snapshot(version: VersionState) -> list[PlanObject]:
    return [PlanObject(ref, version.version, is_snapshot=True) for ref in version.weights]


def _update(version: VersionState) -> list[PlanObject]:
    """Returns the objects of the update that made `version`; none if a snapshot made it."""
    update = () if version.commit is None else version.commit.commit.update
    return [PlanObject(ref, version.version) for ref in update]
