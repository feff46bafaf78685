"""Measures how long a learner takes to join, and to come back after kill -9: `python -m benchmarks.join`.

A learner is killed once a delta of it is merged, and starts again at once, as the same learner. Syncer and learner are
real processes, on loopback or with a long link between them. Rows are written as each case ends.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from benchmarks.processes import Process, wait_idle
from benchmarks.report import Row, write_rows
from benchmarks.wan.cases import GIGABIT, PORT, Site
from benchmarks.wan.isolation import INSIDE, isolated

_BEGAN_S: Final = time.monotonic()
_EXAMPLES: Final = """examples:
  python -m benchmarks.join                            all cases (about 25 minutes)
  python -m benchmarks.join --millions 50 --samples 1  a quick look, no result

Needs root, for network namespaces; of disk 5 times the float32 size of the largest model, and of memory 3 times.
"""
LOOPBACK: Final = "loopback"
LINKS: Final = (LOOPBACK, "2 Gbit/s, 100 ms")
_RATE: Final = 2 * GIGABIT
_ROUND_TRIP_S: Final = 0.1
# Models of more parameters lie in mapped files, so that only what the exchange needs takes memory.
_LARGEST_IN_MEMORY: Final = 1000
_STEP_S: Final = 0.1
_LONGEST_S: Final = 900.0
_IDLE_S: Final = 30.0
# What happens from the start of a process on, in this order: a delta is due after H steps.
STAGES: Final = (
    "interpreter",
    "import torch",
    "import skerry",
    "model made",
    "connected",
    "run found",
    "first byte",
    "last byte",
    "attached",
    "first step",
    "acknowledged",
    "merged",
)


def main() -> int:
    """Runs what the arguments say."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.join",
        description=(__doc__ or "").partition("\n\n")[2],
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--millions", type=int, nargs="+", default=[50, 500, 2000], help="of parameters, by model")
    parser.add_argument("--link", choices=LINKS, nargs="+", default=[*LINKS])
    parser.add_argument("--samples", type=int, default=5, help="returns of a learner, by model and link")
    parser.add_argument(INSIDE, type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside is None:
        return isolated("benchmarks.join")
    site = Site(given.inside, _say, is_short=False)
    rows: list[Row] = []
    for millions in given.millions:
        try:
            for found in rows_of(site, millions, given.link, given.samples):
                rows += found
                write_rows("join", rows)
        finally:
            site.clear()
    return 0


def rows_of(site: Site, millions: int, links: Sequence[str], samples: int) -> Iterator[list[Row]]:
    """Yields what one model took over each of the links."""
    numel, is_mapped = millions * 1_000_000, millions > _LARGEST_IN_MEMORY
    with tempfile.TemporaryDirectory(dir=site.folder) as folder:

        def started(link: str, *options: str) -> Process:
            node, target = ("syncer", f"127.0.0.1:{PORT}") if link == LOOPBACK else ("one", site.target)
            common = ["--target", target, "--numel", str(numel), "--step-s", str(_STEP_S), *options]
            if is_mapped:
                common += ["--folder", folder]
            return site.start(node, "benchmarks.join.learner", "--started-s", repr(time.monotonic()), *common)

        site.serve()
        learner = started(LOOPBACK, "--create")
        answer = learner.hear(_LONGEST_S)
        site.say(f"{millions}M: created, {_told(answer)}")
        site.limit(_RATE, round_trip_s=_ROUND_TRIP_S)
        for link in links:
            answers = []
            for number in range(samples):
                wait_idle(_IDLE_S)
                learner.end()
                learner = started(link)
                answers.append(learner.hear(_LONGEST_S))
                site.say(f"{millions}M, {link}, return {number + 1}: {_told(answers[-1])}")
            yield list(rows_of_returns(f"{millions}M parameters, {link}", answers, None if link == LOOPBACK else _RATE))


def _told(answer: Any) -> str:
    return ", ".join(f"{name} {at_s:.2f} s" for name, at_s in answer["at_s"].items())


def rows_of_returns(case: str, answers: list[Any], bits_per_s: float | None) -> Iterator[Row]:
    """Yields what returns of a learner took, over a link of `bits_per_s` if that is limited."""

    def values(name: str, kind: str = "at_s") -> list[float]:
        return [answer[kind][name] for answer in answers]

    def between(first: str, last: str, kind: str = "at_s") -> list[float]:
        return [end - begin for begin, end in zip(values(first, kind), values(last, kind), strict=True)]

    size_bytes = min(answer["size_bytes"] for answer in answers)
    limit_s = None if bits_per_s is None else 8 * size_bytes / bits_per_s + _ROUND_TRIP_S
    yield best(case, "process start to first step", values("first step"), "s")
    yield best(case, "kill -9 to next merged delta", values("merged"), "s")
    yield best(case, "bytes pulled", [answer["size_bytes"] / 1e6 for answer in answers], "MB")
    yield best(case, "pull, from the answer that names the run", between("run found", "last byte"), "s", limit=limit_s)
    stages = [stage for stage in STAGES if stage in answers[0]["at_s"]]
    yield best(case, f"until {stages[0]}", values(stages[0]), "s")
    for before, stage in pairwise(stages):
        yield best(case, f"until {stage}", between(before, stage), "s")
        yield best(case, f"until {stage}: CPU of the learner", between(before, stage, "cpu_s"), "s")
    for name in answers[0]["spent_s"]:
        yield best(case, f"CPU of {name}", values(name, "spent_s"), "s")


def best(case: str, metric: str, samples: Sequence[float], unit: str, *, limit: float | None = None) -> Row:
    """Returns the row of the least sample: what else a machine does only makes things slower."""
    value = min(samples)
    return Row(case, metric, value, unit, limit, value / limit if limit else None, tuple(samples))


def _say(what: str) -> None:
    print(f"[{time.monotonic() - _BEGAN_S:6.1f} s] {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
