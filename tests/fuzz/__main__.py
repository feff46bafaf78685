"""`python -m tests.fuzz [--minutes N] [--only NAME] [--seed TEXT]`: fuzzes every decoder and the calls of a syncer.

Each gets an equal share of the time. A finding is printed and its input kept in build/fuzz/<decoder>: mend the decoder,
and move the file to tests/fuzz/corpus/<decoder>. With --record the inputs are added to tests/fuzz/counts.json, and
--below 10000000 leaves out the readers that had so many. The exit status is 1 if anything was found.

`--make-corpus` draws a few inputs of each reader anew instead, with different outcomes, to tests/fuzz/corpus.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.fuzz import conversations
from tests.fuzz.campaign import Result, hunt
from tests.fuzz.decoders import DECODERS
from tests.fuzz.outcomes import CORPUS, MADE, made

COUNTS = Path(__file__).parent / "counts.json"
PAGE = Path(__file__).parents[2] / "docs" / "security.md"
_FINDINGS = Path("build/fuzz")
_TARGETS: dict[str, Callable[[str, float], Result]] = {
    **{name: partial(hunt, decoder) for name, decoder in DECODERS.items()},
    **conversations.TARGETS,
}


def with_table(page: str, counts: dict[str, int]) -> str:
    """Returns the page with the counts, between its two marks."""
    rows = [f"| {name} | {count:,} |" for name, count in sorted(counts.items(), key=lambda one: -one[1])]
    table = "\n".join(["| reader | inputs of all runs |", "|---|---|", *rows])
    return re.sub(r"(<!-- table fuzz[^\n]*-->\n).*?(<!-- end -->)", rf"\1{table}\n\2", page, flags=re.DOTALL)


def make_corpus(name: str) -> None:
    """Writes a few inputs of a reader, in the place of those that were made before."""
    folder = CORPUS / name
    folder.mkdir(exist_ok=True)
    for path in folder.glob(f"{MADE}*"):
        path.unlink()
    drawn = made(DECODERS[name]) if name in DECODERS else conversations.MADE[name]()
    for outcome, data in drawn.items():
        (folder / f"{MADE}{outcome}").write_bytes(data)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="for all of them (1)")
    parser.add_argument("--only", choices=_TARGETS, action="append", help="one of them; may be given several times")
    parser.add_argument("--below", type=int, help="only those with fewer inputs than this in tests/fuzz/counts.json")
    parser.add_argument("--seed", default=str(time.time_ns()), help="the same seed makes the same inputs")
    parser.add_argument("--record", action="store_true", help="count the inputs in tests/fuzz/counts.json")
    parser.add_argument("--make-corpus", action="store_true", help="write a small corpus")
    given = parser.parse_args()
    os.environ["GRPC_VERBOSITY"] = "NONE"  # it logs every call that is cut
    names = given.only or list(_TARGETS)
    if given.below:
        counted = json.loads(COUNTS.read_text())
        names = [name for name in names if counted.get(name, 0) < given.below]
    if given.make_corpus:
        for name in names:
            make_corpus(name)
        return
    print(
        f"seed {given.seed}\n{'decoder':16}{'inputs':>12}{'a second':>10}{'right':>8}{'slowest ms':>12}{'MiB more':>10}"
    )
    found = False
    for name in names:
        began_s = time.monotonic()
        result = _TARGETS[name](given.seed, 60 * given.minutes / len(names))
        rate = result.inputs / (time.monotonic() - began_s)
        right = result.accepted / max(result.inputs, 1)
        print(
            f"{name:16}{result.inputs:12,}{rate:10,.0f}{right:8.1%}{1000 * result.slowest_s:12.1f}"
            f"{result.grown_bytes / 2**20:10.1f}",
            flush=True,
        )
        for finding in result.findings:
            found = True
            path = _FINDINGS / name / finding.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(finding.data)
            print(f"  FOUND {finding.what}: {path}", flush=True)
        if given.record:
            counts: dict[str, int] = json.loads(COUNTS.read_text())
            counts[name] = counts.get(name, 0) + result.inputs
            COUNTS.write_text(json.dumps(counts, indent=2, sort_keys=True) + "\n")
            PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), counts), encoding="utf-8")
    sys.exit(found)


if __name__ == "__main__":
    main()
