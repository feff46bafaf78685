"""Makes the golden store: a small run with every kind of item, from seeded identifiers and a clock that counts.

`python -m tests.unit.syncer.store.make_golden` writes it anew. Do so only where the format changes on purpose.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from pathlib import Path

import numpy as np

from skerry.runtime.clock import SystemClock
from skerry.wire.layout import FragmentLayout, TensorSpec
from skerry.wire.policy import MergeRule, OuterName, OuterOptimizer, OuterSchedule, Policy
from skerry_syncer.store.log.checkpoints import write_checkpoint
from skerry_syncer.store.log.entries import (
    Decided,
    EjectionItem,
    Fate,
    FateItem,
    LeftItem,
    MetricsItem,
    RunSpec,
    RunStatus,
    StatusItem,
)
from skerry_syncer.store.objects.local import MARKER
from tests.support.dict_objects import DictObjects
from tests.support.log_bench import store_on
from tests.support.merge_driver import FLOAT32, FRAGMENT, INT4, Driver
from tests.support.seeded_entropy import SeededEntropy

GOLDEN = Path(__file__).parent / "golden"
LAYOUT = FragmentLayout(
    FRAGMENT,
    (
        TensorSpec("wte.weight", (6, 8)),
        TensorSpec("__metadata__", (5,)),
        TensorSpec("scale", ()),
        TensorSpec("block/0: läuft", (3, 2, 4)),
    ),
)
DTYPES = {
    "wte.weight": "bfloat16",
    "__metadata__": "float32",
    "scale": "float32",
    "block/0: läuft": "float16",
}
# Stated in full, and rounds of at most H steps: so that a better default, or rule for long rounds, makes no other log.
_OUTER = OuterOptimizer(OuterName.NESTEROV, learning_rate=0.8, momentum=0.5, schedule=OuterSchedule.CONSTANT)


class _CountingClock(SystemClock):
    """Goes on by a second at every reading of its monotonic time."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0

    def monotonic_s(self) -> float:
        self._now_s += 1.0
        return self._now_s

    def unix_s(self) -> float:
        return 1_700_000_000.0 + self._now_s


async def make(objects: DictObjects) -> dict[str, object]:
    """Writes the run into `objects` and returns what a reader must find."""
    values = np.random.Generator(np.random.PCG64(1))
    uid = SeededEntropy(random.Random(1)).hex_id()
    spec = RunSpec("golden", uid, (LAYOUT,), DTYPES, 1_700_000_000.0)
    weights = values.standard_normal(LAYOUT.numel).astype(np.float32)
    policy = Policy(merge=MergeRule.MEAN, outer=_OUTER, update_encoding=INT4)
    driver = await Driver.start(LAYOUT, policy, spec=spec, weights=weights, objects=objects, clock=_CountingClock())
    log = driver.log
    await store_on(objects, clock=_CountingClock()).publish("golden", spec.uid)

    def delta() -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        return (0.01 * values.standard_normal(LAYOUT.numel)).astype(np.float32)

    early = await driver.push(0, delta(), encoding=INT4, cuts=(48,))
    await driver.round([early, await driver.push(1, delta())], weights=[3.0, 1.0], participation=0.75)
    await driver.round([await driver.push(2, delta(), encoding=FLOAT32)])
    await driver.snapshot()
    await driver.append(LeftItem("m2", f"{2:032x}"))
    await driver.append(FateItem((Decided((await driver.push(1, delta())).delta, Fate.QUARANTINED, "outlier"),)))
    await driver.round([await driver.push(0, delta(), encoding=INT4)])
    await driver.roll_back(1)
    await driver.collect(*(part.name for part in early.parts))
    await write_checkpoint(log)
    await driver.round([await driver.push(1, delta())])
    judged = MetricsItem(driver.log.entropy.hex_id(), log.state.position, "eval", {"loss": 3.5, "score": None})
    ejected = EjectionItem(driver.log.entropy.hex_id(), "m1", is_ejected=True, author="skerry://admin/anna")
    await driver.append(judged, ejected, StatusItem(RunStatus.CLOSING), StatusItem(RunStatus.CLOSED))
    fragment = log.state.fragments[FRAGMENT]
    return {
        "uid": spec.uid,
        "position": log.state.position,
        "head_digest": log.state.head_digest,
        "version_digests": {str(version): state.digest for version, state in fragment.versions.items()},
        "fates": {delta: state.fate for delta, state in log.state.deltas.items()},
    }


def main() -> None:
    """Writes the golden store."""
    objects = DictObjects()
    expected = asyncio.run(make(objects))
    shutil.rmtree(GOLDEN, ignore_errors=True)
    objects.objects[MARKER] = (b'{"format":1}', 0.0)
    for name, (data, _) in objects.objects.items():
        path = GOLDEN / "store" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (GOLDEN / "expected.json").write_text(json.dumps(expected, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
