"""Runs many seeds through all mixes of faults: `python -m tests.simulation.campaign --seeds 1000`.

Each seed of each mix is one history; a failing one is reported with the command that repeats it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice

from tests.simulation.judgement import Verdict, judge
from tests.simulation.mixes import MIXES
from tests.simulation.mutations import MUTATIONS, findings_of


def _judged(task: tuple[str, int]) -> Verdict:
    return judge(*task)


def main(arguments: list[str] | None = None) -> int:
    """Runs the campaign and returns the process's exit code: 1 where anything was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100, help="histories in all, over all mixes (default: 100)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--seed", type=int, help="only this seed, of every mix named")
    parser.add_argument("--mix", action="append", choices=sorted(MIXES), help="only this mix; may be repeated")
    parser.add_argument("--minutes", type=float, help="stop after so long, whatever --seeds says")
    parser.add_argument("--workers", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--mutations", action="store_true", help="break the product on purpose; each must be found")
    given = parser.parse_args(arguments)
    if given.mutations:
        return _report_mutations()
    mixes = given.mix or list(MIXES)
    if given.seed is not None:
        tasks: Iterable[tuple[str, int]] = [(mix, given.seed) for mix in mixes]
    else:
        tasks = islice(_tasks(mixes, given.first), given.seeds)
    return _report(tasks, workers=given.workers, until_s=None if given.minutes is None else 60 * given.minutes)


def _tasks(mixes: list[str], first: int) -> Iterator[tuple[str, int]]:
    seed = first
    while True:
        yield from ((mix, seed) for mix in mixes)
        seed += 1


def _report(tasks: Iterable[tuple[str, int]], *, workers: int, until_s: float | None) -> int:
    started_s = time.perf_counter()
    failed: list[Verdict] = []
    count = versions = deltas = 0
    for verdict in _verdicts(tasks, workers):
        count += 1
        versions += verdict.version_count
        deltas += verdict.accepted_count
        failed += [verdict] if verdict.findings else []
        print(verdict, flush=True)
        if until_s is not None and time.perf_counter() - started_s > until_s:
            break
    wall_s = time.perf_counter() - started_s
    print(f"histories={count} versions={versions} deltas={deltas} failed={len(failed)} wall_s={wall_s:.0f}")
    for verdict in failed:
        print(f"  {verdict.command}")
    return 1 if failed else 0


def _report_mutations() -> int:
    missed = 0
    for mutation in MUTATIONS:
        findings = list(findings_of(mutation))
        missed += not findings
        print(f"{'found ' if findings else 'MISSED'} {mutation.name}: {findings[0] if findings else ''}", flush=True)
    return 1 if missed else 0


def _verdicts(tasks: Iterable[tuple[str, int]], workers: int) -> Iterator[Verdict]:
    if workers == 1:
        yield from map(_judged, tasks)
        return
    with ProcessPoolExecutor(workers) as pool:
        queue = iter(tasks)
        running = [pool.submit(_judged, task) for task in islice(queue, 2 * workers)]
        try:
            while running:
                verdict = running.pop(0).result()
                running += [pool.submit(_judged, task) for task in islice(queue, 1)]
                yield verdict
        finally:
            for future in running:
                future.cancel()


if __name__ == "__main__":
    sys.exit(main())
