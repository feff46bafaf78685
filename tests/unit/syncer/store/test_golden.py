"""A store that an older version wrote is read and verified, entry by entry as it was written."""

import json
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest

from skerry_syncer.store.log.entries import Entry, Item
from skerry_syncer.store.maintenance.checking import verify_run
from skerry_syncer.store.objects.opening import open_objects
from skerry_syncer.store.versions.replay import Replayer
from skerry_syncer.store.versions.run import Run
from skerry_syncer.store.versions.scratch import Scratch
from tests.support.dict_objects import DictObjects
from tests.support.log_bench import store_on
from tests.unit.syncer.store.make_golden import GOLDEN, make


@pytest.fixture
def expected() -> dict[str, Any]:
    values: dict[str, Any] = json.loads((GOLDEN / "expected.json").read_bytes())
    return values


@pytest.fixture
async def run(tmp_path: Path) -> Run:
    shutil.copytree(GOLDEN / "store", tmp_path / "store")
    store = store_on(open_objects(f"file://{tmp_path}/store"))
    ((name, uid),) = await store.list_runs()
    return await store.open_run(name, uid)


async def test_the_golden_run_is_what_it_was_and_verifies(run: Run, expected: dict[str, Any]) -> None:
    versions = run.state.fragments["body"].versions
    assert {
        "uid": run.spec.uid,
        "position": run.state.position,
        "head_digest": run.state.head_digest,
        "version_digests": {str(version): state.digest for version, state in versions.items()},
        "fates": {delta: state.fate for delta, state in run.state.deltas.items()},
    } == expected
    report = await verify_run(run, scratch=Scratch(None))
    assert (report.problems, report.versions_checked) == ((), 6)
    assert report.versions_replayed >= 2
    for version in versions:
        await Replayer(run, "body").weights_at(version)


async def test_every_kind_of_item_is_in_the_golden_log_and_is_written_as_it_was_read(run: Run) -> None:
    kinds: set[str] = set()
    async for entry, data in run.log.entries():
        assert Entry.from_bytes(data).to_bytes() == data
        kinds.update(item.kind for item in entry.items)
    assert kinds == {kind.__struct_config__.tag for kind in get_args(Item)}


async def test_the_recipe_still_makes_the_same_log(expected: dict[str, Any]) -> None:
    assert json.loads(json.dumps(await make(DictObjects()))) == expected
