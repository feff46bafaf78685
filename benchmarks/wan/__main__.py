"""Measures Skerry over long and slow links: `python -m benchmarks.wan`.

Learners and syncer are real processes in network namespaces of their own. tc's token bucket limits their links, and a
relay makes them long.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Final

from benchmarks.report import Row, write_rows
from benchmarks.wan.cases import CASES, Site, measure
from benchmarks.wan.isolation import INSIDE, isolated

_BEGAN_S: Final = time.monotonic()
_EXAMPLES: Final = """examples:
  python -m benchmarks.wan                       all cases (about 16 minutes)
  python -m benchmarks.wan --only long-link      one case
  python -m benchmarks.wan --short               smaller and fewer, to see that it works; no result

Needs root, for network namespaces.
"""


def main() -> int:
    """Runs what the arguments say; returns 0 if each case gave its rows."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.wan",
        description=(__doc__ or "").partition("\n\n")[2],
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=CASES, default=[*CASES], metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--short", action="store_true", help="smaller and fewer")
    parser.add_argument(INSIDE, type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside is not None:
        return _measure(given)
    return isolated("benchmarks.wan")


def _measure(given: argparse.Namespace) -> int:
    site = Site(given.inside, _say, is_short=given.short)
    rows: list[Row] = []
    failed = 0
    for name in given.only:
        _say(f"{name}: begins")
        try:
            rows += measure(name, site)
        except (RuntimeError, TimeoutError, OSError) as error:
            failed += 1
            _say(f"{name} gave no result: {error}")
    write_rows("wan", rows)
    return 1 if failed else 0


def _say(what: str) -> None:
    print(f"[{time.monotonic() - _BEGAN_S:6.1f} s] {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
