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
from skerry.v1 import types_pb2 as v1
from skerry.wire.digests import tree_digest
from skerry.wire.messages import policy_from_message, policy_to_message
from skerry.wire.policy import OuterName, OuterOptimizer, OuterSchedule, Policy
from skerry_syncer.store.log.checkpoints import write_checkpoint
from skerry_syncer.store.log.entries import ENTRY_FORMAT, Entry, Item, LevelItem
from skerry_syncer.store.log.run_log import RunLog
from skerry_syncer.store.maintenance.export import export_checkpoint
from skerry_syncer.store.maintenance.verify import verify_run
from skerry_syncer.store.objects.opening import open_objects
from skerry_syncer.store.store import Store
from skerry_syncer.store.versions.replay import Replayer
from skerry_syncer.store.versions.scratch import Scratch
from tests.support.dict_objects import DictObjects
from tests.unit.algorithm.merge_driver import Driver, layout_of
from tests.unit.syncer.store.make_golden import ALL_GOLDEN, GOLDEN, LAYOUT, make

# By the level of the golden run: kinds of items that came later.
NEWER_KINDS = {3: {"level", "checkpoint"}, 4: set[str](), 5: set[str]()}


@pytest.fixture(params=ALL_GOLDEN, ids=lambda folder: folder.name)
def golden(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.param
    return folder


@pytest.fixture
def expected(golden: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((golden / "expected.json").read_bytes())
    return values


async def opened(tmp_path: Path) -> RunLog:
    """The golden run, read by a process of its own."""
    store = Store(
        open_objects(f"file://{tmp_path}/store"),
        clock=SystemClock(),
        entropy=SystemEntropy(),
        workers=InlineWorkers(),
        writer="test",
    )
    return await store.open_log("golden", await store.resolve("golden"))


@pytest.fixture
async def log(golden: Path, tmp_path: Path) -> RunLog:
    shutil.copytree(golden / "store", tmp_path / "store")
    return await opened(tmp_path)


async def test_the_golden_log_folds_to_what_it_said_then(log: RunLog, expected: dict[str, Any]) -> None:
    versions = log.state.fragments["body"].versions
    assert (log.spec.uid, log.state.position, log.state.head_digest) == (
        expected["uid"],
        expected["position"],
        expected["head_digest"],
    )
    assert {str(version): state.digest for version, state in versions.items()} == expected["version_digests"]
    assert {delta: state.fate for delta, state in log.state.deltas.items()} == expected["fates"]


async def test_the_golden_run_verifies_and_its_weights_have_their_digests(log: RunLog) -> None:
    report = await verify_run(log, workers=InlineWorkers(), scratch=Scratch(None))
    assert report.problems == ()
    assert report.versions_checked == 6
    assert report.versions_replayed >= 2
    for version, state in log.state.fragments["body"].versions.items():
        weights = await Replayer(log, "body", InlineWorkers()).weights_at(version)
        assert weights.shape == (LAYOUT.numel,)
        assert tree_digest(np.ascontiguousarray(weights)).hex() == state.digest


async def test_every_kind_of_item_is_in_the_golden_log_and_is_written_as_it_was_read(log: RunLog) -> None:
    kinds: set[str] = set()
    async for entry, data in log.entries():
        assert Entry.from_bytes(data).to_bytes() == data
        kinds.update(item.kind for item in entry.items)
    assert kinds == {kind.kind for kind in get_args(Item)} - NEWER_KINDS[log.state.level]


async def test_a_golden_run_is_upgraded_and_reads_as_before(
    log: RunLog, expected: dict[str, Any], tmp_path: Path
) -> None:
    await log.append([LevelItem(ENTRY_FORMAT)])
    await write_checkpoint(log)
    again = await opened(tmp_path)
    assert (again.state.level, again.state.position) == (ENTRY_FORMAT, log.state.position)
    assert again.state.checkpoint_at == log.state.position - 1, "it was opened from the checkpoint"
    versions = again.state.fragments["body"].versions
    assert {str(version): state.digest for version, state in versions.items()} == expected["version_digests"]
    assert (await verify_run(again, workers=InlineWorkers(), scratch=Scratch(None))).problems == ()


async def test_the_recipe_still_makes_the_same_log() -> None:
    objects = DictObjects()
    made = json.loads(json.dumps(await make(objects)))
    expected = json.loads((GOLDEN / "expected.json").read_bytes())
    assert made["version_digests"] == expected["version_digests"]


async def test_a_run_whose_policy_names_retired_rules_opens_verifies_and_keeps_its_words(tmp_path: Path) -> None:
    """Replay goes by the scalars of the commits, so what was merged under a rule outlives the rule."""
    retired = OuterOptimizer(OuterName.DELAYED_NESTEROV, learning_rate=0.7, momentum=0.9, schedule=OuterSchedule.RAMP)
    driver = await Driver.start(layout_of((4, 4)), Policy(outer=retired))
    for values in ([1.0] * 16, [0.5] * 16):
        await driver.round([await driver.push(0, values), await driver.push(1, values)])
    log = driver.log
    assert log.state.policy.outer == retired
    report = await verify_run(log, workers=driver.workers, scratch=Scratch(None))
    assert (report.problems, report.versions_replayed) == ((), 2)
    path = tmp_path / "weights.safetensors"
    await export_checkpoint(log, path, position=log.state.position, dtype="float32", workers=driver.workers)
    assert path.stat().st_size > 4 * 16
    message = policy_to_message(log.state.policy)
    assert (message.outer.name, message.outer.schedule) == ("nesterov", v1.OUTER_SCHEDULE_WARM_UP)
    with pytest.raises(ValueError, match="outer optimizer is not offered"):
        policy_from_message(v1.Policy(outer=v1.OuterOptimizer(name="delayed-nesterov", learning_rate=0.7)), Policy())
