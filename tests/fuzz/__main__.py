"""`python -m tests.fuzz [--minutes N] [--only NAME] [--seed TEXT]`: fuzzes every decoder and the calls of a syncer.

Each gets an equal share of the time. A finding is printed and its input kept in build/fuzz/<decoder>: mend the decoder,
and move the file to tests/fuzz/corpus/<decoder>. The exit status is 1 if anything was found.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

_FINDINGS: Final = Path("build/fuzz")


def main() -> None:
    os.environ["GRPC_VERBOSITY"] = "NONE"  # which gRPC reads when it is imported: it logs every call that is cut
    import skerry  # noqa: F401 - before gRPC, whose handlers of fork() it turns off
    from tests.fuzz.campaign import Result, hunt
    from tests.fuzz.conversations import against_syncer
    from tests.fuzz.decoders import DECODERS

    targets: dict[str, Callable[[str, float], Result]] = {
        **{name: partial(hunt, decoder) for name, decoder in DECODERS.items()},
        "calls": against_syncer,
    }
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="for all of them (1)")
    parser.add_argument("--only", choices=targets, action="append", help="one of them; may be given several times")
    parser.add_argument("--seed", default=str(time.time_ns()), help="the same seed makes the same inputs")
    arguments = parser.parse_args()
    names = arguments.only or list(targets)
    print(f"seed {arguments.seed}")
    print(f"{'decoder':16}{'inputs':>12}{'a second':>10}{'right':>8}")
    found = False
    for name in names:
        began_s = time.monotonic()
        result = targets[name](arguments.seed, 60 * arguments.minutes / len(names))
        rate = result.inputs / (time.monotonic() - began_s)
        right = result.accepted / max(result.inputs, 1)
        print(f"{name:16}{result.inputs:12,}{rate:10,.0f}{right:8.1%}", flush=True)
        for finding in result.findings:
            found = True
            path = _FINDINGS / name / finding.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(finding.data)
            print(f"  FOUND {finding.what}: {path}", flush=True)
    sys.exit(found)


if __name__ == "__main__":
    main()
