"""More fragments than scratch has space for: the one that was used least recently goes, and is rebuilt when needed."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from skerry.wire.policy import Policy
from skerry_syncer.merge.merger import Merger
from skerry_syncer.merge.outer_states import OuterStates
from skerry_syncer.store.maintenance.checking import verify_run
from skerry_syncer.store.versions.scratch import SMALLEST_FILE_BYTES, Scratch
from tests.support.merge_driver import FRAGMENT, Driver, layout_of

LAYOUT = layout_of((700, 400))
STATE_BYTES = 3 * 4 * LAYOUT.numel
DISK_STATES = 2
RUN_COUNT = 4


@pytest.fixture
def small_scratch(tmp_path: Path) -> Iterator[Scratch]:
    """Scratch on a real file system that holds the outer states of two fragments."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_STATES * STATE_BYTES + 2**18}", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs root to mount a small disk")
    yield Scratch(tmp_path)
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


async def drivers() -> list[Driver]:
    """As many runs of one fragment as a syncer might have fragments, on stores of their own."""
    assert STATE_BYTES > 3 * SMALLEST_FILE_BYTES
    return [await Driver.start(LAYOUT, Policy()) for _ in range(RUN_COUNT)]


async def test_merges_go_on_when_scratch_is_full(small_scratch: Scratch) -> None:
    runs = await drivers()
    mergers = [Merger(run.run, workers=run.workers, scratch=small_scratch) for run in runs]
    for version in (1, 2):
        for run, merger in zip(runs, mergers, strict=True):
            delta = await run.push(0, np.full(LAYOUT.numel, 0.5, np.float32))
            await merger.merge(await run.close([delta]))
            assert run.log.state.fragments[FRAGMENT].version == version
            run.state.version = version
    for run in runs:
        report = await verify_run(run.run, workers=run.workers, scratch=Scratch(None))
        assert (report.problems, report.versions_replayed) == ((), 2)


async def test_the_least_recently_used_goes_first_whatever_run_it_is_of(small_scratch: Scratch) -> None:
    runs = await drivers()
    states = [OuterStates(run.run, run.workers, small_scratch) for run in runs]
    fragments = [run.log.state.fragments[FRAGMENT] for run in runs]

    def is_cached(index: int) -> bool:
        with states[index].reading(fragments[index]) as outer:
            return outer is not None

    async def use(index: int) -> None:
        state = await states[index].take(fragments[index], 0)
        states[index].keep(FRAGMENT, state, fragments[index].newest.digest)

    def cached() -> list[int]:
        return [index for index in range(RUN_COUNT) if is_cached(index)]

    await use(0)
    await use(1)
    await use(0)
    assert cached() == [0, 1]
    await use(2)
    assert cached() == [0, 2]
    await use(3)
    assert cached() == [2, 3]
