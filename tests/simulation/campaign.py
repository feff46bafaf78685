"""Runs many seeds through all mixes of faults: `python -m tests.simulation.campaign --seeds 1000`.

Each seed of each mix is one history; a failing one is reported with the command that repeats it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from itertools import count, islice

from tests.simulation.judgement import Verdict, judge
from tests.simulation.mixes import MIXES


def _judged(task: tuple[str, int]) -> Verdict:
    return judge(*task)


def main() -> int:
    """Runs the campaign and returns the process's exit code: 1 where anything was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100, help="histories in all, over all mixes (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--mix", action="append", choices=sorted(MIXES), help="only this mix; may be repeated")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--workers", type=int, default=1, help="processes (default: 1)")
    given = parser.parse_args()
    tasks = ((mix, seed) for seed in count(given.seed) for mix in given.mix or MIXES)
    started_s = time.perf_counter()
    verdicts: list[Verdict] = []
    with multiprocessing.Pool(given.workers) as pool:
        for verdict in pool.imap(_judged, islice(tasks, given.seeds)):
            verdicts.append(verdict)
            print(verdict, flush=True)
            if time.perf_counter() - started_s > 60 * given.minutes:
                break
    failed = [verdict for verdict in verdicts if verdict.findings]
    versions = sum(verdict.version_count for verdict in verdicts)
    deltas = sum(verdict.accepted_count for verdict in verdicts)
    wall_s = time.perf_counter() - started_s
    print(f"histories={len(verdicts)} versions={versions} deltas={deltas} failed={len(failed)} wall_s={wall_s:.0f}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
