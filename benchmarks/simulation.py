"""How fast the simulation is, on one core: `python -m benchmarks.simulation [--seeds 1] [--mix NAME]`.

Every history is run and audited as a campaign does it, and measured by its process's CPU time, so that what else the
machine does counts little. A simulated job-hour is an hour of virtual time of one job: its learners (four in most
mixes) and three replicas. The limit of versions per second is what the event loop alone would reach: as many callbacks
as the histories had, if each did nothing. Where the time goes is sampled on the way, by the innermost frame of this
tree: what NumPy, asyncio and the standard library do counts for the room that called them.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

from benchmarks.report import Row, measured, write_rows
from tests.simulation.judgement import Verdict, judge
from tests.simulation.mixes import MIXES
from tests.simulation.virtual_time import run_virtual

_EMPTY_CALLBACKS: Final = 100_000
_ROOT: Final = f"{Path(__file__).parents[1]}/"
_SAMPLED_EVERY_S: Final = 0.002
# By the beginning of a file's path; the first that fits.
_ROOMS: Final = {
    "tests/simulation/virtual_time": "event loop, and tasks that asyncio steps",
    "tests/simulation/processes": "event loop, and tasks that asyncio steps",
    "tests/simulation/network": "simulated network",
    "tests/simulation/sim_transport": "simulated network",
    "tests/simulation/shared_store": "simulated store",
    "tests/support": "simulated store",
    "tests": "the rest of the simulation",
    "client/skerry/wire": "product: codecs, frames, digests",
    "client/skerry/algorithm": "product: the algorithm",
    "services/skerry_syncer/store/log": "product: the log and its fold",
    "services/skerry_syncer/store": "product: the rest of the store",
    "services/skerry_syncer": "product: the syncer",
    "client": "product: the client",
    "core": "product: clocks, retries, workers",
}
_AUDIT: Final = ("tests/simulation/auditor", "tests/simulation/evidence", "tests/simulation/judgement")


def empty_callback_s() -> float:
    """Returns the CPU seconds that the loop takes for a callback that does nothing, half of them after a timer."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        left = _EMPTY_CALLBACKS // 2

        def again() -> None:
            nonlocal left
            left -= 1
            if left:
                loop.call_later(1e-3, loop.call_soon, again)
            else:
                done.set_result(None)

        again()
        await done

    started_s = time.process_time()
    run_virtual(main)
    return (time.process_time() - started_s) / _EMPTY_CALLBACKS


@contextmanager
def sampled() -> Iterator[Counter[str]]:
    """Yields how often each room was found at work, every `_SAMPLED_EVERY_S` seconds of CPU time."""
    counts: Counter[str] = Counter()

    def look(_: int, frame: FrameType | None) -> None:
        paths = []
        while frame is not None:
            paths.append(frame.f_code.co_filename.removeprefix(_ROOT))
            frame = frame.f_back
        counts[_room(paths)] += 1

    before = signal.signal(signal.SIGPROF, look)
    signal.setitimer(signal.ITIMER_PROF, _SAMPLED_EVERY_S, _SAMPLED_EVERY_S)
    try:
        yield counts
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


def _room(paths: Sequence[str]) -> str:
    """Returns the room of a stack's files, innermost first."""
    # `judge` is at the bottom of every stack; what it does itself, it does after the history.
    if any(path.startswith(_AUDIT[:2]) for path in paths) or paths[0].startswith(_AUDIT):
        return "auditor, verify and digests"
    for path in paths:
        for prefix, room in _ROOMS.items():
            if path.startswith(prefix):
                return room
    return "elsewhere"


def rows_of(case: str, measurements: Sequence[tuple[Verdict, float]], callback_s: float) -> Iterator[Row]:
    """Yields the rows of histories, each with the CPU seconds that it took."""
    cpu_s = sum(seconds for _, seconds in measurements)
    versions = sum(verdict.version_count for verdict, _ in measurements)
    callbacks = sum(verdict.callback_count for verdict, _ in measurements)
    virtual_s = sum(verdict.virtual_s for verdict, _ in measurements)
    limit = versions / (callbacks * callback_s)
    yield measured(case, "versions", [versions / cpu_s], "1/s", limit=limit)
    yield measured(case, "callbacks a version", [callbacks / max(versions, 1)], "")
    yield measured(case, "simulated job-hours an hour", [virtual_s / cpu_s], "")


def main() -> None:
    """Measures the mixes and writes the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1, help="histories of each mix (default: 1)")
    parser.add_argument("--mix", action="append", choices=sorted(MIXES), help="only this mix; may be repeated")
    given = parser.parse_args()
    callback_s = empty_callback_s()
    measurements: dict[str, list[tuple[Verdict, float]]] = {}
    with sampled() as counts:
        for mix in given.mix or MIXES:
            for seed in range(given.seeds):
                started_s = time.process_time()
                verdict = judge(mix, seed)
                measurements.setdefault(mix, []).append((verdict, time.process_time() - started_s))
    rows = [row for mix, own in measurements.items() for row in rows_of(mix, own, callback_s)]
    everything = [one for own in measurements.values() for one in own]
    rows += [
        *rows_of("all mixes", everything, callback_s),
        measured("the loop alone", "callback that does nothing", [1e6 * callback_s], "us"),
    ]
    rows += [
        measured("where the time goes", room, [100 * count / counts.total()], "%")
        for room, count in counts.most_common()
    ]
    write_rows("simulation", rows)


if __name__ == "__main__":
    main()
