"""The cheapest way to a version: updates, or a snapshot and the updates after it."""

from __future__ import annotations

import pytest

from skerry.wire.codecs import Codec, Encoding
from skerry.wire.layout import FragmentLayout, TensorSpec
from skerry_syncer.errors import SyncerError
from skerry_syncer.run.pull import plan_pull, resume_plan
from skerry_syncer.store.log.entries import ClosedItem, CommittedItem, MergeScalars, ObjectRef
from skerry_syncer.store.log.state import CommitRecord, FragmentState, VersionState

UPDATE_BYTES, SNAPSHOT_BYTES = 10, 25


def _version(number: int, *, has_update: bool = True, has_snapshot: bool = False) -> VersionState:
    ref = ObjectRef(f"u{number}", 0, 4, UPDATE_BYTES, "")
    commit = CommittedItem("body", number, 0, (ref,), Encoding(Codec.INT4), "", MergeScalars("", "", (), (), "", ""))
    record = CommitRecord(ClosedItem("body", number, 0, (), 1.0, (), 24.0), commit)
    weights = (ObjectRef(f"s{number}", 0, 4, SNAPSHOT_BYTES, ""),) if has_snapshot else ()
    return VersionState(number, "", number, commit=record if has_update else None, weights=weights)


def _fragment(*versions: VersionState) -> FragmentState:
    fragment = FragmentState(FragmentLayout("body", (TensorSpec("w", (4,)),)))
    fragment.versions = {version.version: version for version in versions}
    fragment.version = max(fragment.versions)
    return fragment


# Version 3 has a snapshot beside its update; a roll-back made version 6.
FRAGMENT = _fragment(
    _version(0, has_update=False, has_snapshot=True),
    *(_version(number, has_snapshot=number == 3) for number in range(1, 6)),
    _version(6, has_update=False, has_snapshot=True),
    _version(7),
)


def _names(from_version: int, target: int, *gone: str) -> tuple[int, list[str]]:
    plan = plan_pull(FRAGMENT, set(gone), from_version=from_version, target_version=target)
    return plan.from_version, [part.ref.name for part in plan.objects]


@pytest.mark.parametrize(
    ("from_version", "target", "gone", "expected"),
    [
        (5, 5, (), (5, [])),
        (3, 5, (), (3, ["u4", "u5"])),
        (-1, 5, (), (-1, ["s3", "u4", "u5"])),
        (-1, 5, ("s3",), (-1, ["s0", "u1", "u2", "u3", "u4", "u5"])),
        (1, 3, (), (1, ["u2", "u3"])),
        (0, 3, (), (-1, ["s3"])),  # 25 bytes, where updates have 30
        (0, 3, ("s3",), (0, ["u1", "u2", "u3"])),
        (1, 5, ("u2",), (-1, ["s3", "u4", "u5"])),
        (5, 7, (), (-1, ["s6", "u7"])),  # a roll-back abandoned what the caller has
        (6, 7, (), (6, ["u7"])),
    ],
)
def test_a_plan_has_the_fewest_bytes(
    from_version: int, target: int, gone: tuple[str, ...], expected: tuple[int, list[str]]
) -> None:
    assert _names(from_version, target, *gone) == expected


@pytest.mark.parametrize(("target", "gone"), [(8, ()), (5, ("u4",)), (2, ("s0",))])
def test_a_version_without_content_is_not_found(target: int, gone: tuple[str, ...]) -> None:
    with pytest.raises(SyncerError) as caught:
        _names(-1, target, *gone)
    assert caught.value.reason == "VERSION_NOT_FOUND"


@pytest.mark.parametrize("names", [["s3", "u4", "u5"], ["u4", "u5"], ["s0", "u1", "u2", "u3", "u4", "u5"]])
def test_a_resumed_plan_has_the_objects_that_it_names_although_another_one_is_smaller(names: list[str]) -> None:
    plan = resume_plan(FRAGMENT, set(), names, from_version=3, target_version=5)
    assert [part.ref.name for part in plan.objects] == names
    assert plan.from_version == (-1 if names[0].startswith("s") else 3)


@pytest.mark.parametrize(
    ("names", "gone"),
    [(["u4", "u5"], "u5"), (["s3", "u4", "u5"], "s3"), (["u4", "u7"], ""), ([], ""), (["u4", "u4", "u5"], "")],
)
def test_a_plan_that_is_not_there_any_more_has_expired(names: list[str], gone: str) -> None:
    with pytest.raises(SyncerError) as caught:
        resume_plan(FRAGMENT, {gone}, names, from_version=3, target_version=5)
    assert caught.value.reason == "PLAN_EXPIRED"
