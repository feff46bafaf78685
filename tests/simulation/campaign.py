"""Runs many seeds through all mixes of faults: `python -m tests.simulation.campaign --seeds 1000`.

Each seed of each mix is one history; a failing one is reported with the command that repeats it.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice

from skerry.store.entries import Entry
from tests.simulation.auditor import Finding, audit
from tests.simulation.evidence import Evidence
from tests.simulation.mixes import MIXES
from tests.simulation.world import live


@dataclass(frozen=True)
class Verdict:
    """What became of one history."""

    mix: str
    seed: int
    findings: tuple[Finding, ...]
    digest: str  # of the log and the learners' records: the same history has the same
    version_count: int
    accepted_count: int
    virtual_s: float
    wall_s: float

    @property
    def command(self) -> str:
        """What repeats this history."""
        return f"python -m tests.simulation.campaign --mix {self.mix} --seed {self.seed}"

    def __str__(self) -> str:
        """Returns the verdict, and the command where something was found."""
        counts = f"versions={self.version_count} deltas={self.accepted_count} virtual_s={self.virtual_s:.0f}"
        head = f"{self.mix} seed={self.seed} {counts} wall_s={self.wall_s:.2f} digest={self.digest[:16]}"
        if not self.findings:
            return f"ok   {head}"
        return "\n".join([f"FAIL {head}", *(f"     {finding}" for finding in self.findings), f"     {self.command}"])


def judge(mix: str, seed: int) -> Verdict:
    """Lives and audits one history."""
    started_s = time.perf_counter()
    evidence = live(seed, MIXES[mix])
    findings = asyncio.run(audit(evidence))
    kinds = [item.kind for entry in _entries(evidence) for item in entry.items]
    return Verdict(
        mix=mix,
        seed=seed,
        findings=tuple(findings),
        digest=history_digest(evidence),
        version_count=kinds.count("committed"),
        accepted_count=kinds.count("accepted"),
        virtual_s=evidence.virtual_s,
        wall_s=time.perf_counter() - started_s,
    )


def history_digest(evidence: Evidence) -> str:
    """Returns a digest of everything that a history left: all objects, and what each learner trained and heard."""
    hasher = hashlib.sha256()
    for name, (data, _) in sorted(evidence.objects.objects.items()):
        hasher.update(f"{name} {len(data)} {evidence.landed.get(name)}\n".encode())
        hasher.update(data)
    for record in evidence.records:
        heard = sorted(record.acknowledged.items())
        hasher.update(f"{record.learner}.{record.incarnation} {record.session} {record.step_count} {heard}\n".encode())
    return hasher.hexdigest()


def _entries(evidence: Evidence) -> Iterator[Entry]:
    for name in sorted(evidence.landed):
        yield Entry.from_bytes(evidence.objects.objects[name][0])


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
    given = parser.parse_args(arguments)
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
