"""A store that an older version wrote is read and verified, entry by entry as it was written."""

import json
import shutil
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from skerry.runtime.clock import SystemClock
from skerry.runtime.identifiers import SystemEntropy
from skerry.runtime.workers import InlineWorkers
from skerry.wire.digests import tree_digest
from skerry_syncer.store.log.checkpoints import write_checkpoint
from skerry_syncer.store.log.entries import Entry, Item
from skerry_syncer.store.maintenance.checking import verify_run
from skerry_syncer.store.objects.opening import open_objects
from skerry_syncer.store.store import Store
from skerry_syncer.store.versions.replay import Replayer
from skerry_syncer.store.versions.run import Run
from skerry_syncer.store.versions.scratch import Scratch
from tests.support.dict_objects import DictObjects
from tests.unit.syncer.store.make_golden import GOLDEN, LAYOUT, make


@pytest.fixture
def expected() -> dict[str, Any]:
    values: dict[str, Any] = json.loads((GOLDEN / "expected.json").read_bytes())
    return values


async def opened(tmp_path: Path) -> Run:
    """The golden run, read by a process of its own."""
    store = Store(
        open_objects(f"file://{tmp_path}/store"),
        clock=SystemClock(),
        entropy=SystemEntropy(),
        workers=InlineWorkers(),
        writer="test",
    )
    return await store.open_run("golden", await store.resolve("golden"))


@pytest.fixture
async def run(tmp_path: Path) -> Run:
    shutil.copytree(GOLDEN / "store", tmp_path / "store")
    return await opened(tmp_path)


async def test_the_golden_log_folds_to_what_it_said_then(run: Run, expected: dict[str, Any]) -> None:
    versions = run.state.fragments["body"].versions
    assert (run.spec.uid, run.state.position, run.state.head_digest) == (
        expected["uid"],
        expected["position"],
        expected["head_digest"],
    )
    assert {str(version): state.digest for version, state in versions.items()} == expected["version_digests"]
    assert {delta: state.fate for delta, state in run.state.deltas.items()} == expected["fates"]


async def test_the_golden_run_verifies_and_its_weights_have_their_digests(run: Run) -> None:
    report = await verify_run(run, workers=InlineWorkers(), scratch=Scratch(None))
    assert report.problems == ()
    assert report.versions_checked == 6
    assert report.versions_replayed >= 2
    for version, state in run.state.fragments["body"].versions.items():
        weights = await Replayer(run, "body", InlineWorkers()).weights_at(version)
        assert weights.shape == (LAYOUT.numel,)
        assert tree_digest(np.ascontiguousarray(weights)).hex() == state.digest


async def test_every_kind_of_item_is_in_the_golden_log_and_is_written_as_it_was_read(run: Run) -> None:
    kinds: set[str] = set()
    async for entry, data in run.log.entries():
        assert Entry.from_bytes(data).to_bytes() == data
        kinds.update(item.kind for item in entry.items)
    assert kinds == {kind.__struct_config__.tag for kind in get_args(Item)}


async def test_a_golden_run_goes_on_from_a_checkpoint_and_reads_as_before(
    run: Run, expected: dict[str, Any], tmp_path: Path
) -> None:
    await write_checkpoint(run.log)
    again = await opened(tmp_path)
    assert again.state.position == run.state.position
    assert again.state.checkpoint_at == run.state.position - 1, "it was opened from the checkpoint"
    versions = again.state.fragments["body"].versions
    assert {str(version): state.digest for version, state in versions.items()} == expected["version_digests"]
    assert (await verify_run(again, workers=InlineWorkers(), scratch=Scratch(None))).problems == ()


async def test_the_recipe_still_makes_the_same_log(expected: dict[str, Any]) -> None:
    made = json.loads(json.dumps(await make(DictObjects())))
    assert made["version_digests"] == expected["version_digests"]
