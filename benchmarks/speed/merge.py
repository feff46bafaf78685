"""Merging the closed round of a fragment: eight int4 deltas, from a store on disk to a durable update.

Its limit is copying as many float32 elements as the deltas have, all threads at it. Each merge is repeated on the same
round.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.report import Row
from benchmarks.speed.measuring import SEED, Size, paired
from benchmarks.speed.models import shapes_of
from skerry.runtime.workers import ThreadWorkers, Workers
from skerry.wire.codecs import Codec, Encoding, cut_parts
from skerry.wire.policy import Policy
from skerry_syncer.merge.merger import merge_round
from skerry_syncer.store.log.entries import ClosedItem
from skerry_syncer.store.objects.opening import open_objects
from skerry_syncer.store.versions.replay import Replayer
from skerry_syncer.store.versions.run import Run
from skerry_syncer.store.versions.scratch import Scratch, memory_share_bytes
from tests.support.merge_driver import FRAGMENT, Driver, layout_of

LEARNERS: Final = 8
_THREADS: Final = 2
_PART_BYTES: Final = 4 * 2**20  # what a syncer suggests
_COPY_NUMEL: Final = 2**25  # what one thread copies again and again: far more than any cache


async def _closed(folder: Path, numel: int, workers: Workers) -> tuple[Run, ClosedItem]:
    """Returns a run on disk with one int4 delta of each learner, and the close of their round."""
    encoding, layout = Encoding(Codec.INT4), layout_of(*shapes_of(numel).values())
    source = np.random.default_rng(SEED)
    weights = source.standard_normal(layout.numel, np.float32)
    objects = open_objects(folder.as_uri(), new=True)
    driver = await Driver.start(layout, Policy(), weights=weights, objects=objects, workers=workers)
    cuts = [first for first, _ in cut_parts(layout, encoding, _PART_BYTES)][1:]
    deltas = []
    for learner in range(LEARNERS):
        source.standard_normal(out=weights, dtype=np.float32)
        deltas.append(await driver.push(learner, weights, encoding=encoding, cuts=cuts))
    return driver.run, await driver.close(deltas)


async def _measure(folder: Path, numel: int, samples: int) -> list[Row]:
    workers = ThreadWorkers(_THREADS)
    run, closing = await _closed(folder / "store", numel, workers)
    (folder / "scratch").mkdir()
    scratch = Scratch(folder / "scratch", memory_bytes=memory_share_bytes())  # as `skerry serve` has it
    layout = run.spec.fragment(FRAGMENT)
    found: dict[str, list[float]] = {"copy": [], "merge": []}
    for sample in range(samples + 1):
        copy_s = _copy_s(layout.numel * LEARNERS)
        state = await Replayer(run, FRAGMENT).rebuild(0, scratch)
        with scratch.lent(layout.numel) as acc:
            start_s = time.perf_counter()
            result = await merge_round(run, closing, state, acc)
            await result.stored()
            if sample:
                found["copy"].append(copy_s)
                found["merge"].append(time.perf_counter() - start_s)
    workers.close()
    case = f"{LEARNERS} int4 deltas of {layout.numel / 1e6:.3g}M parameters, {_THREADS} threads"
    metric = "merge to a durable update / memcpy of the deltas as float32"
    return [paired(case, metric, found["merge"], "s", limits=found["copy"])]


def _copy_s(numel: int) -> float:
    """Returns the seconds that copying `numel` float32 elements takes, all threads at it, between pages that exist."""
    share = min(numel // _THREADS, _COPY_NUMEL)
    pairs = [(np.ones(share, np.float32), np.ones(share, np.float32)) for _ in range(_THREADS)]
    with ThreadPoolExecutor(_THREADS) as pool:
        start_s = time.perf_counter()
        list(pool.map(lambda pair: np.copyto(pair[1], pair[0]), pairs))
        return (time.perf_counter() - start_s) * numel / (share * _THREADS)


def rows(size: Size) -> Iterator[Row]:
    """A fragment of 100 million parameters."""
    with tempfile.TemporaryDirectory(prefix="skerry-benchmark-") as name:
        yield from asyncio.run(_measure(Path(name), size.pick(100_000_000, 4_000_000), size.samples))
