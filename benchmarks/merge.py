"""How fast a round is merged, and how much memory that takes.

    python -m benchmarks.merge [--speed] [--memory] [--numel 16777216] [--learners 8] [--samples 3] [--threads 2]

Speed is in GB/s of the learners' float32 elements, from a store on disk to a durable update, against copying the same
bytes once with all threads. Memory is the peak of a process of its own that rebuilds the state of a fragment of
100 million parameters from the store, merges eight int4 deltas into it, commits and adopts, against six times the
fragment's float32 size. The peak counts what is resident of memory-mapped scratch files, too. Both unless one is asked
for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.merged_run import FRAGMENT, UID, layout_of, open_store, prepare
from benchmarks.report import Row, measured, write_rows
from skerry.algorithm.step import OuterState
from skerry.runtime.workers import ThreadWorkers
from skerry.store.log.run_log import RunLog
from skerry.store.versions.replay import Replayer
from skerry.store.versions.scratch import Scratch
from skerry.syncer.merger import merge_round

MEMORY_NUMEL: Final = 100_000_000
MEMORY_LEARNERS: Final = 8
MEMORY_LIMIT: Final = 6  # of the fragment's float32 size


async def speed_rows(directory: Path, arguments: argparse.Namespace) -> list[Row]:
    """Times a merge, its adoption and its replay."""
    workers = ThreadWorkers(arguments.threads)
    layout = layout_of(arguments.numel)
    await prepare(directory, arguments.numel, arguments.learners, workers)
    store, scratch = open_store(directory, workers), Scratch(_made(directory / "scratch"))
    log = await store.open_log("merge", UID)
    closing = log.state.fragments[FRAGMENT].closing
    assert closing is not None  # `prepare` closed it
    found: dict[str, list[float]] = {"memcpy": [], "merge": [], "adopt": [], "replay": []}
    result = None
    for sample in range(arguments.samples + 1):
        copying = _copy_s(layout.numel * arguments.learners, arguments.threads)
        state = await Replayer(log, FRAGMENT, workers).rebuild(0, scratch)
        start = time.perf_counter()
        result = await merge_round(log, FRAGMENT, closing, state, workers=workers, scratch=scratch)
        merged = time.perf_counter()
        await result.adopt(state, workers=workers)
        adopted = time.perf_counter()
        if sample:  # the first one warms up
            found["memcpy"].append(copying)
            found["merge"].append(merged - start)
            found["adopt"].append(adopted - merged)
    assert result is not None
    await log.append([result.commit])
    for _ in range(arguments.samples):
        start = time.perf_counter()
        await Replayer(log, FRAGMENT, workers).rebuild(1, scratch)
        found["replay"].append(time.perf_counter() - start)
    await store.close()
    workers.close()
    size_bytes = 4 * layout.numel * arguments.learners
    rates = {name: [size_bytes / sample / 1e9 for sample in samples] for name, samples in found.items()}
    limit = statistics.median(rates.pop("memcpy"))
    case = f"{arguments.learners} learners, {layout.numel / 1e6:.1f}M, {arguments.threads} threads"
    return [measured(case, f"{name} / memcpy", samples, "GB/s", limit=limit) for name, samples in rates.items()]


def _copy_s(numel: int, threads: int) -> float:
    """Returns the seconds that copying `numel` float32 elements takes, all threads at it, between pages that exist."""
    share = min(numel // threads, 2**25)
    pairs = [(np.ones(share, np.float32), np.ones(share, np.float32)) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        start = time.perf_counter()
        list(pool.map(lambda pair: np.copyto(pair[1], pair[0]), pairs))
        return (time.perf_counter() - start) * numel / (share * threads)


def memory_rows(directory: Path, threads: int) -> Iterator[Row]:
    """Measures the peak memory of a merge in a process of its own."""
    asyncio.run(_prepare_alone(directory))
    command = [sys.executable, "-m", "benchmarks.merge", "--child", str(directory), "--threads", str(threads)]
    figures = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    size_bytes = 4 * layout_of(MEMORY_NUMEL).numel
    case = f"{MEMORY_LEARNERS} int4 deltas of {size_bytes / 4e6:.0f}M parameters"
    limit = MEMORY_LIMIT * size_bytes / 1e9
    for name in ("peak", "peak by ru_maxrss", "before the merge"):
        yield measured(case, f"{name} / {MEMORY_LIMIT} x float32", [figures[name] / 1e9], "GB", limit=limit)
    yield measured(case, "peak / float32 size", [figures["peak"] / size_bytes], "times", limit=MEMORY_LIMIT)
    yield measured(case, "merge and adopt", [figures["seconds"]], "s")


async def _prepare_alone(directory: Path) -> None:
    workers = ThreadWorkers(2)
    await prepare(directory, MEMORY_NUMEL, MEMORY_LEARNERS, workers)
    workers.close()


async def merge_alone(directory: Path, threads: int) -> dict[str, float]:
    """Merges the prepared round as a syncer would after a restart, and returns what it took."""
    workers = ThreadWorkers(threads)
    store, scratch = open_store(directory, workers), Scratch(_made(directory / "scratch"))
    log = await store.open_log("merge", UID)
    before = _status_bytes("VmRSS")
    state = await Replayer(log, FRAGMENT, workers).rebuild(0, scratch)
    start = time.perf_counter()
    await _merge(log, state, workers, scratch)
    seconds = time.perf_counter() - start
    await store.close()
    return {
        "before the merge": before,
        "peak": _status_bytes("VmHWM"),
        "peak by ru_maxrss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "seconds": seconds,
    }


async def _merge(log: RunLog, state: OuterState, workers: ThreadWorkers, scratch: Scratch) -> None:
    closing = log.state.fragments[FRAGMENT].closing
    assert closing is not None  # `prepare` closed it
    result = await merge_round(log, FRAGMENT, closing, state, workers=workers, scratch=scratch)
    await log.append([result.commit])
    await result.adopt(state, workers=workers)


def _status_bytes(field: str) -> float:
    """Returns a size from the kernel's account of this process; resident file pages count as all others."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return float(value.split()[0]) * 1024
    raise ValueError(f"kernel does not tell. field={field}")


def _made(directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    return directory


def _in_a_folder(measure: Callable[[Path], list[Row]]) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="skerry-benchmark-") as directory:
        return measure(Path(directory))


def main() -> None:
    """Measure, print and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speed", action="store_true", help="measure speed only")
    parser.add_argument("--memory", action="store_true", help="measure memory only")
    parser.add_argument("--numel", type=int, default=2**24, help="elements of the fragment whose merge is timed")
    parser.add_argument("--learners", type=int, default=8, help="deltas of the round that is timed")
    parser.add_argument("--samples", type=int, default=3, help="measurements of each value")
    parser.add_argument("--threads", type=int, default=2, help="worker threads")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        sys.stdout.write(json.dumps(asyncio.run(merge_alone(arguments.child, arguments.threads))))
        return
    both = arguments.speed == arguments.memory
    rows: list[Row] = []
    if both or arguments.speed:
        rows += _in_a_folder(lambda directory: asyncio.run(speed_rows(directory, arguments)))
    if both or arguments.memory:
        rows += _in_a_folder(lambda directory: list(memory_rows(directory, arguments.threads)))
    write_rows("merge", rows)


if __name__ == "__main__":
    main()
