"""Measures Skerry beside its rivals: `python -m benchmarks.rivals`.

Two learners with the same 50.3M float32 parameters synchronise once: everybody's change is merged, and everybody has
the result. Each system runs in turns, in a network of the benchmark's own. The bytes are counted by the network
interface, and a run after which the learners' weights differ is no result.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.report import Row, measured, write_rows
from benchmarks.rivals.contenders import CONTENDERS, Contender, UnavailableError, python_of
from benchmarks.rivals.turns import LINKS, Found, measure
from benchmarks.wan.isolation import INSIDE, isolated

_BEGAN_S: Final = time.monotonic()
_EXAMPLES: Final = """examples:
  python -m benchmarks.rivals                             all systems, on loopback and on 1 Gbit/s
  python -m benchmarks.rivals --link 1gbit                one link only
  python -m benchmarks.rivals --only skerry torchft       two systems
  python -m benchmarks.rivals --visits 1 --samples 1      a quick look, no result

Needs root, for a network of its own. Rivals are installed below build/rivals the first time.
"""


def main() -> int:
    """Runs what the arguments say; returns 0 if each system gave a result or could not be installed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rivals",
        description=(__doc__ or "").partition("\n\n")[2],
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [contender.name for contender in CONTENDERS]
    parser.add_argument("--link", choices=[*LINKS, "both"], default="both", help="what limits the link (default: both)")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--visits", type=int, default=3, help="turns of each system (default: 3)")
    parser.add_argument("--samples", type=int, default=2, help="synchronisations a turn and link (default: 2)")
    parser.add_argument("--minutes", type=float, default=30.0, help="begin no turn after so long (default: 30)")
    parser.add_argument(INSIDE, type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside is not None:
        return _measure(given)
    return isolated("benchmarks.rivals", lambda: _available(given.only))


def _available(names: Sequence[str]) -> list[tuple[Contender, str]]:
    """Returns the systems, each with its interpreter; installs those that are not installed yet."""
    found = []
    for contender in CONTENDERS:
        if contender.name in names:
            try:
                found.append((contender, python_of(contender, _say)))
            except UnavailableError as error:
                _say(f"{contender.name} is left out: {error}")
    return found


def _measure(given: argparse.Namespace) -> int:
    links = [*LINKS] if given.link == "both" else [given.link]
    found, failed = measure(
        _available(given.only),
        links,
        given.inside,
        visits=given.visits,
        samples=given.samples,
        longest_s=60 * given.minutes,
        say=_say,
    )
    done = {key: one for key, one in found.items() if one.wall_s and key[0] not in failed}
    for link in links:
        write_rows(f"rivals-{link}", rows(link, {name: one for (name, where), one in done.items() if where == link}))
    return 1 if failed else 0


def rows(link: str, found: Mapping[str, Found]) -> Iterator[Row]:
    """Yields the rows of one link; the limit of a time is what the link needs for the bytes."""
    titles = {contender.name: contender.title for contender in CONTENDERS}
    for name, one in found.items():
        limit_s = [8 * size / LINKS[link] for size in one.sent_bytes]
        limit = sorted(limit_s)[len(limit_s) // 2] or None
        yield measured(
            titles[name], "full synchronisation / the link's time for its bytes", one.wall_s, "s", limit=limit
        )
        yield measured(titles[name], "bytes on the wire in all", [size / 1e6 for size in one.sent_bytes], "MB")
        yield measured(titles[name], "CPU of all processes", one.cpu_s, "s")
    own = found.get("skerry")
    for name, one in found.items():
        if own is None or name == "skerry":
            continue
        case = f"Skerry against {titles[name]}"
        time_s, size = measured("", "", one.wall_s, "s").value, measured("", "", one.sent_bytes, "B").value
        yield measured(case, "full synchronisation", own.wall_s, "s", limit=time_s)
        yield measured(
            case, "bytes on the wire in all", [each / 1e6 for each in own.sent_bytes], "MB", limit=size / 1e6
        )


def _say(what: str) -> None:
    print(f"[{time.monotonic() - _BEGAN_S:6.1f} s] {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
