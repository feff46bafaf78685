"""A collection takes whole drafts that lost the name, long ago, and no run that ever had it."""

from collections.abc import Awaitable, Callable, Sequence

import pytest

from skerry.runtime.clock import SystemClock
from skerry.runtime.identifiers import SystemEntropy
from skerry.runtime.workers import InlineWorkers
from skerry.wire.layout import FragmentLayout, TensorSpec
from skerry_syncer.store.errors import RunNotFoundError, StoreUnavailableError
from skerry_syncer.store.log.entries import RunSpec
from skerry_syncer.store.maintenance.drafts import NamelessRun, delete_nameless, nameless_runs
from skerry_syncer.store.store import Store
from tests.support.dict_objects import DictObjects

LOST, WINNER, OLDER, YOUNG = ("a" * 32, "b" * 32, "c" * 32, "d" * 32)
LAYOUT = FragmentLayout("body", (TensorSpec("w", (4,)),))
DAY_S = 86_400.0


class Calendar:
    """The object store's clock, moved by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def store_on(objects: DictObjects) -> Store:
    return Store(objects, clock=SystemClock(), entropy=SystemEntropy(), workers=InlineWorkers(), writer="test")


async def draft(store: Store, uid: str) -> None:
    run = await store.create_draft(RunSpec("run", uid, (LAYOUT,), {"w": "float32"}, 0.0))
    await run.blobs.write_part("body", "e" * 32, 0, 4, "0" * 64, [0.0], [b"weights"])


@pytest.fixture
async def objects() -> DictObjects:
    """A name that one run had and lost, another has, a third never got, and a fourth may still get."""
    calendar = Calendar()
    objects = DictObjects(unix=calendar)
    store = store_on(objects)
    for uid in (LOST, OLDER, WINNER):
        await draft(store, uid)
    await store.publish("run", OLDER)
    await store.unpublish("run", OLDER)
    await store.publish("run", WINNER)
    calendar.now_s = 2 * DAY_S
    await draft(store, YOUNG)
    return objects


def uids(runs: Sequence[NamelessRun]) -> list[str]:
    return [run.uid for run in runs]


async def test_only_an_old_draft_that_never_had_the_name_may_go(objects: DictObjects) -> None:
    before = dict(objects.objects)
    (found,) = await nameless_runs(store_on(objects), "run", modified_before_unix_s=DAY_S)
    sizes = [len(data) for name, (data, _) in objects.objects.items() if f"/{LOST}/" in name]
    assert found == NamelessRun("run", LOST, False, len(sizes), sum(sizes))
    assert objects.objects == before


async def test_a_deleted_run_may_go_only_when_asked_for(objects: DictObjects) -> None:
    found = await nameless_runs(store_on(objects), "run", modified_before_unix_s=DAY_S, includes_deleted=True)
    assert [(run.uid, run.was_named) for run in found] == [(LOST, False), (OLDER, True)]


async def test_a_draft_goes_whole_and_nothing_else_does(objects: DictObjects) -> None:
    store = store_on(objects)
    others = {name: data for name, data in objects.objects.items() if f"/{LOST}/" not in name}
    (found,) = await nameless_runs(store, "run", modified_before_unix_s=DAY_S)
    assert await delete_nameless(store, found, modified_before_unix_s=DAY_S)
    assert objects.objects == others
    with pytest.raises(RunNotFoundError):
        await store.open_run("run", LOST)


async def test_a_deletion_that_was_cut_off_leaves_nothing_to_open_and_is_finished_by_the_next(
    objects: DictObjects,
) -> None:
    class Dying(DictObjects):
        deletions = 0

        async def delete(self, names: Sequence[str]) -> None:
            self.deletions += 1
            if self.deletions > 1:
                raise StoreUnavailableError("gone")
            await super().delete(names)

    dying = Dying()
    dying.objects = objects.objects
    (found,) = await nameless_runs(store_on(dying), "run", modified_before_unix_s=DAY_S)
    with pytest.raises(StoreUnavailableError):
        await delete_nameless(store_on(dying), found, modified_before_unix_s=DAY_S)
    store = store_on(objects)
    with pytest.raises(RunNotFoundError):
        await store.open_run("run", LOST)
    (left,) = await nameless_runs(store, "run", modified_before_unix_s=DAY_S)
    assert left.uid == LOST
    assert await delete_nameless(store, left, modified_before_unix_s=DAY_S)
    assert not any(f"/{LOST}/" in name for name in objects.objects)


async def _publishes(store: Store) -> None:
    await store.unpublish("run", WINNER)
    await store.publish("run", LOST)


async def _pushes(store: Store) -> None:
    await store.objects.create(f"runs/run/{LOST}/deltas/body/young", b"weights")


@pytest.mark.parametrize("comes_back", [_publishes, _pushes])
@pytest.mark.parametrize("is_before", [True, False])
async def test_a_creator_who_comes_back_meanwhile_keeps_the_run_whole(
    objects: DictObjects, comes_back: Callable[[Store], Awaitable[None]], is_before: bool
) -> None:
    store = store_on(objects)
    (found,) = await nameless_runs(store, "run", modified_before_unix_s=DAY_S)
    names = {name for name in objects.objects if f"/{LOST}/" in name}

    class Raced(DictObjects):
        async def delete(self, deleted: Sequence[str]) -> None:
            await super().delete(deleted)
            await comes_back(store)

    raced: DictObjects = objects
    if is_before:
        await comes_back(store)
    else:
        raced = Raced(unix=lambda: 2 * DAY_S)
        raced.objects = objects.objects
    assert not await delete_nameless(store_on(raced), found, modified_before_unix_s=DAY_S)
    assert names <= set(objects.objects)
