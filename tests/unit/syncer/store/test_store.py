"""Drafts and names: who has a name, and since when."""

import asyncio
import json

import pytest

from skerry.wire.layout import FragmentLayout, TensorSpec
from skerry_syncer.store.errors import (
    DraftConflictError,
    NewerFormatError,
    RunNotFoundError,
)
from skerry_syncer.store.log.entries import FORMAT, RunSpec
from tests.support.log_bench import LAYOUT, OTHER_UID, SPEC, UID, Bench, on_virtual_time


@on_virtual_time
async def test_a_draft_is_created_once_whoever_repeats_it(bench: Bench) -> None:
    log = (await bench.store().create_draft(SPEC)).log
    again = (await bench.store().create_draft(RunSpec("run", UID, (LAYOUT,), {"w": "float32"}, 99.0))).log
    assert again.spec == log.spec
    assert again.spec.created_at_unix_s == 0.0
    other = FragmentLayout("body", (TensorSpec("w", (5,)),))
    with pytest.raises(DraftConflictError):
        await bench.store().create_draft(RunSpec("run", UID, (other,), {"w": "float32"}, 0.0))


@on_virtual_time
async def test_a_name_belongs_to_the_run_that_had_it_first_until_it_is_taken_away(bench: Bench) -> None:
    store = bench.store()
    assert await store.resolve("run") is None
    answers = await asyncio.gather(
        *(bench.store().publish("run", uid) for uid in (UID, OTHER_UID, UID, OTHER_UID)), return_exceptions=True
    )
    winner = await store.resolve("run")
    assert winner is not None
    loser = OTHER_UID if winner == UID else UID
    refusals = [answer for answer in answers if answer is not None]
    assert [getattr(refusal, "metadata", refusal) for refusal in refusals] == [{"run_uid": winner}] * 2
    with pytest.raises(RunNotFoundError):
        await store.unpublish("run", loser)
    for _ in range(2):
        await store.unpublish("run", winner)
    assert await store.list_runs() == []
    await store.publish("run", loser)
    assert await store.list_runs() == [("run", loser)]
    await store.unpublish("run", loser)
    with pytest.raises(RunNotFoundError):
        await store.publish("run", winner)  # a late repetition does not undo a deletion


@on_virtual_time
async def test_runs_that_are_not_there_are_not_found(bench: Bench) -> None:
    with pytest.raises(RunNotFoundError):
        await bench.store().open_run("run", UID)


@on_virtual_time
async def test_names_and_specs_of_a_newer_format_are_no_damage(bench: Bench) -> None:
    store = bench.store()
    log = (await store.create_draft(SPEC)).log
    await store.publish("run", UID)
    for name in (f"{log.prefix}/run.json", f"runs/run/names/{1:020}"):
        values = json.loads(bench.shared.objects[name][0]) | {"format": FORMAT + 1}
        bench.shared.objects[name] = (json.dumps(values).encode(), 0.0)
    with pytest.raises(NewerFormatError):
        await bench.store().open_run("run", UID)
    with pytest.raises(NewerFormatError):
        await store.resolve("run")
