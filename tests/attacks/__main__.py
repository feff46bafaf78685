"""`python -m tests.attacks`: one honest learner beside each attack, and a table."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Final

from tests.attacks.attacks import ATTACKS
from tests.attacks.beside import MOST_MIB, beside
from tests.attacks.target import Target
from tests.support.no_cloud import stay_here

# Merges a second that must be left beside an attack, on two cores that have ten in peace.
_LEAST_RATE: Final = 5.0
_PEACE_RATE: Final = 10.0


async def attack(name: str, target: Target) -> None:
    """Attacks until SIGTERM, and prints what it was told."""
    told = Counter[str]()
    attacking: asyncio.Task[None] = asyncio.create_task(ATTACKS[name](target, told))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, attacking.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await attacking
    print(json.dumps(told))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.attacks", description=__doc__)
    parser.add_argument("--only", choices=ATTACKS, help="one attack")
    parser.add_argument("--seconds", type=float, default=10.0, help="under each attack")
    parser.add_argument("--roles", action="store_true", help="by mutual TLS; the attacker has one identity")
    parser.add_argument("--as", dest="name", choices=ATTACKS, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--keys", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    stay_here()
    if given.name:
        asyncio.run(attack(given.name, Target(given.port, given.keys)))
        return
    print(f"{'attack':20}{'peace/s':>9}{'attack/s':>9}{'p99 ms':>9}{'MiB':>8}  what it was told", flush=True)
    failed = []
    for name in [given.only] if given.only else ATTACKS:
        row = asyncio.run(beside(name, given.seconds, has_roles=given.roles))
        print(row, flush=True)
        failed += [] if row.is_held(_LEAST_RATE * min(1.0, row.peace / _PEACE_RATE)) else [name]
    if failed:
        sys.exit(f"fewer than {_LEAST_RATE:g} merges a second, or {MOST_MIB} MiB and more, beside {', '.join(failed)}")


if __name__ == "__main__":
    main()
