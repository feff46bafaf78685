"""Runs many seeds through all mixes of faults: `python -m tests.simulation.campaign --seeds 1000`.

Each seed of each mix is one history; a failing one is reported with the command that repeats it.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import multiprocessing
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice

from skerry_syncer.store.log.entries import Entry
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
    digest: str  # of the store's objects and the learners' records: equal for equal histories
    version_count: int
    accepted_count: int
    wall_s: float

    @property
    def command(self) -> str:
        """The command that repeats this history."""
        return f"python -m tests.simulation.campaign --mix {self.mix} --seed {self.seed} --seeds 1"

    def __str__(self) -> str:
        """Returns the verdict, and the command where something was found."""
        counts = f"versions={self.version_count} deltas={self.accepted_count}"
        head = f"{self.mix} seed={self.seed} {counts} wall_s={self.wall_s:.2f} digest={self.digest[:16]}"
        if not self.findings:
            return f"ok   {head}"
        return "\n".join([f"FAIL {head}", *(f"     {finding}" for finding in self.findings), f"     {self.command}"])


def judge(mix: str, seed: int) -> Verdict:
    """Runs and audits one history."""
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
        wall_s=time.perf_counter() - started_s,
    )


def history_digest(evidence: Evidence) -> str:
    """Returns a digest of everything that a history left: all objects, and what each learner trained and heard."""
    hasher = hashlib.sha256()
    for name, (data, _) in sorted(evidence.stored.items()):
        hasher.update(f"{name} {len(data)} {evidence.landed.get(name)}\n".encode())
        hasher.update(data)
    for record in evidence.records:
        heard = sorted(record.acknowledged.items())
        hasher.update(f"{record.learner}.{record.incarnation} {record.session} {record.step_count} {heard}\n".encode())
    return hasher.hexdigest()


def _entries(evidence: Evidence) -> Iterator[Entry]:
    for name in sorted(evidence.landed.keys() & evidence.stored.keys()):  # an abandoned draft is deleted
        yield Entry.from_bytes(evidence.stored[name][0])


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
