"""A collection takes whole drafts that lost the name, long ago, and no run that ever had it."""

from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from skerry_syncer.store.errors import StoreUnavailableError
from skerry_syncer.store.log.entries import RunSpec
from skerry_syncer.store.maintenance.drafts import NamelessRun, delete_nameless, nameless_runs
from skerry_syncer.store.store import Store
from tests.support.hooked_objects import HookedObjects
from tests.support.log_bench import LAYOUT, store_on

LOST, WINNER, OLDER, YOUNG = ("a" * 32, "b" * 32, "c" * 32, "d" * 32)
DAY_S = 86_400.0


class DraftedObjects(HookedObjects):
    """Objects by a clock that a test sets, and the store on them."""

    def __init__(self) -> None:
        super().__init__()
        self.store = store_on(self)

    def lost(self) -> dict[str, tuple[bytes, float]]:
        """The objects of the run that lost the name."""
        return {name: value for name, value in self.objects.items() if f"/{LOST}/" in name}


async def draft(store: Store, uid: str) -> None:
    run = await store.create_draft(RunSpec("run", uid, (LAYOUT,), {"w": "float32"}, 0.0))
    await run.blobs.write_part("body", "e" * 32, 0, 4, "0" * 64, [0.0], [b"weights"])


@pytest.fixture
async def objects() -> DraftedObjects:
    """A name that one run had and lost, another has, a third never got, and a fourth may still get."""
    objects = DraftedObjects()
    store = objects.store
    for uid in (LOST, OLDER, WINNER):
        await draft(store, uid)
    await store.publish("run", OLDER)
    await store.unpublish("run", OLDER)
    await store.publish("run", WINNER)
    objects.now_s = 2 * DAY_S
    await draft(store, YOUNG)
    return objects


async def old_draft(objects: DraftedObjects) -> NamelessRun:
    (run,) = await nameless_runs(objects.store, "run", modified_before_unix_s=DAY_S)
    return run


async def test_only_an_old_draft_that_never_had_the_name_may_go_and_a_deleted_run_if_asked_for(
    objects: DraftedObjects,
) -> None:
    before = dict(objects.objects)
    sizes = [len(data) for data, _ in objects.lost().values()]
    assert await old_draft(objects) == NamelessRun("run", LOST, False, len(sizes), sum(sizes))
    runs = await nameless_runs(objects.store, "run", modified_before_unix_s=DAY_S, includes_deleted=True)
    assert [(run.uid, run.was_named) for run in runs] == [(LOST, False), (OLDER, True)]
    assert objects.objects == before


async def test_a_draft_goes_whole_and_nothing_else_does(objects: DraftedObjects) -> None:
    others = {name: value for name, value in objects.objects.items() if name not in objects.lost()}
    assert await delete_nameless(objects.store, await old_draft(objects), modified_before_unix_s=DAY_S)
    assert objects.objects == others


async def _dies() -> None:
    raise StoreUnavailableError("gone")


async def test_a_deletion_that_was_cut_off_leaves_nothing_to_open_and_is_finished_by_the_next(
    objects: DraftedObjects,
) -> None:
    objects.hooks["after delete", ""] = _dies
    with pytest.raises(StoreUnavailableError):
        await delete_nameless(objects.store, await old_draft(objects), modified_before_unix_s=DAY_S)
    assert f"runs/run/{LOST}/run.json" not in objects.lost(), "it can't be opened"
    assert objects.lost()
    objects.hooks.clear()
    assert await delete_nameless(objects.store, await old_draft(objects), modified_before_unix_s=DAY_S)
    assert not objects.lost()


async def _publishes(store: Store) -> None:
    await store.unpublish("run", WINNER)
    await store.publish("run", LOST)


async def _pushes(store: Store) -> None:
    await store.objects.create(f"runs/run/{LOST}/deltas/body/young", b"weights")


@pytest.mark.parametrize("comes_back", [_publishes, _pushes])
@pytest.mark.parametrize("is_before", [True, False])
async def test_a_creator_who_comes_back_meanwhile_keeps_the_run_whole(
    objects: DraftedObjects, comes_back: Callable[[Store], Awaitable[None]], is_before: bool
) -> None:
    run, before = await old_draft(objects), objects.lost()
    if is_before:
        await comes_back(objects.store)
    else:
        objects.hooks["after delete", ""] = partial(comes_back, objects.store)
    assert not await delete_nameless(objects.store, run, modified_before_unix_s=DAY_S)
    assert before.keys() <= objects.lost().keys()
