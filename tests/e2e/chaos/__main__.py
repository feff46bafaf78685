"""The campaign with real processes: `python -m tests.e2e.chaos --minutes 60 --store s3`; needs root.

Three syncers and six learners run as processes while a seeded storm kills, stops and drains them, cuts and slows their
links, and fills their disk or cuts their way to the store. The learners' own accounts are held against the log all
the time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from tests.e2e.chaos.campaign import Campaign
from tests.e2e.chaos.store_place import KINDS
from tests.support.no_cloud import stay_here

# In a network, mounts and processes of its own: all of it ends with its first process, and nobody outside reaches it.
UNSHARE: Final = ("unshare", "--net", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child=KILL")
_INSIDE: Final = "--inside"


def main() -> int:
    """Runs one campaign; returns 0 where nothing was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.chaos", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="about so long (default: 60)")
    parser.add_argument("--store", choices=KINDS, default="file", help="the kind of store (default: file)")
    parser.add_argument("--seed", type=int, default=1, help="what the storm is drawn from (default: 1)")
    parser.add_argument("--keep", type=Path, help="new folder for journals and logs (default: one that is removed)")
    parser.add_argument(_INSIDE, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    stay_here()
    if arguments.inside is not None:
        return _campaign(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was begun is ended and removed
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True)
        return _isolated(arguments.keep.absolute())
    with tempfile.TemporaryDirectory(prefix="skerry-chaos-", ignore_cleanup_errors=True) as name:
        return _isolated(Path(name))


def _isolated(folder: Path) -> int:
    """Runs the same command inside."""
    # The shell stays, as the first process has to reap those whose parents ended before them.
    inner = f'ip link set lo up && "$0" -B -m tests.e2e.chaos {_INSIDE} {folder} "$@"; exit $?'
    command = ["setpriv", "--pdeathsig=KILL", *UNSHARE, "sh", "-c", inner, sys.executable, *sys.argv[1:]]
    return subprocess.run(command, check=False).returncode


def _campaign(arguments: argparse.Namespace) -> int:
    began_s = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began_s:6.1f} s] {text}", flush=True)

    tempfile.tempdir = str(arguments.inside)
    campaign = Campaign(
        arguments.store, arguments.seed, duration_s=60 * arguments.minutes, folder=arguments.inside, say=say
    )
    asyncio.run(campaign.run())
    print(json.dumps(campaign.report, indent=1))
    for finding in campaign.findings:
        print(f"  {finding}")
    verdict = "FAIL" if campaign.findings else "ok  "
    again = f"--minutes {arguments.minutes:g} --store {arguments.store} --seed {arguments.seed}"
    print(f"{verdict} {len(campaign.findings)} findings in {time.monotonic() - began_s:.0f} s. Again: {again}")
    return 1 if campaign.findings else 0


if __name__ == "__main__":
    sys.exit(main())
