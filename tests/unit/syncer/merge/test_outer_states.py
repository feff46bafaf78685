"""More fragments than scratch has space for: the state of one goes, and is rebuilt when it is needed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from skerry.wire.policy import Policy
from skerry_syncer.merge.merger import Merger
from skerry_syncer.store.versions.scratch import Scratch
from tests.support.merge_driver import FRAGMENT, Driver, layout_of
from tests.support.small_disk import small_disk

LAYOUT = layout_of((1000, 860))  # of the three arrays of its states, a small disk holds two


async def test_merges_go_on_when_scratch_is_full(tmp_path: Path) -> None:
    runs = [await Driver.start(LAYOUT, Policy()) for _ in range(4)]
    with small_disk(tmp_path / "disk") as folder:
        scratch = Scratch(folder)
        mergers = [Merger(run.run, scratch) for run in runs]
        for version in (1, 2):
            for run, merger in zip(runs, mergers, strict=True):
                delta = await run.push(0, np.full(LAYOUT.numel, 0.5, np.float32))
                await merger.merge(await run.close([delta]))
                assert run.log.state.fragments[FRAGMENT].version == version
                run.state.version = version
    for run in runs:
        report = await run.verify()
        assert (report.problems, report.versions_replayed) == ((), 2)
