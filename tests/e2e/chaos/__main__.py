"""The campaign with real processes: `python -m tests.e2e.chaos --minutes 60 --store s3`.

Three syncers and six learners run as processes while a seeded storm kills, stops and drains them, cuts and slows their
links and fails their store. The learners' own accounts are held against the log all the time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from tests.e2e.chaos.campaign import Campaign
from tests.e2e.chaos.control import MUTATION
from tests.support.no_cloud import stay_here

_SHORT_MINUTES: Final = 3.0
_INSIDE: Final = "--inside"
# The storm, the calm run after it, audits and what starting and ending costs: whatever hangs, it ends here.
_LONGEST_SHARE: Final = 2.0
_LONGEST_EXTRA_S: Final = 240.0


def main() -> int:
    """Runs one campaign; returns 0 where nothing was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.chaos", description=__doc__.partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="about three minutes")
    parser.add_argument("--minutes", type=float, help="about so long, the calm run included (default: 60)")
    parser.add_argument("--store", choices=("file", "s3"), default="file", help="the kind of store (default: file)")
    parser.add_argument("--seed", type=int, default=1, help="what the storm is drawn from (default: 1)")
    parser.add_argument("--keep", type=Path, help="folder that keeps the journals and logs of a campaign that failed")
    parser.add_argument("--mutation", default="", help="a defect of tests/simulation/mutations.py to have")
    parser.add_argument(_INSIDE, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    stay_here()
    minutes = _SHORT_MINUTES if arguments.short else arguments.minutes or 60.0
    if arguments.inside is not None:
        return _campaign(arguments, minutes, arguments.inside, is_own=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was begun is ended and removed
    with tempfile.TemporaryDirectory(prefix="skerry-chaos-", ignore_cleanup_errors=True) as name:
        if os.geteuid() == 0 and _may_isolate():
            return _isolated(name)
        return _campaign(arguments, minutes, Path(name), is_own=False)


def _campaign(arguments: argparse.Namespace, minutes: float, folder: Path, *, is_own: bool) -> int:
    """Runs a campaign here, in a folder that is removed by the caller."""
    words = [f"--minutes {minutes:g}", f"--store {arguments.store}", f"--seed {arguments.seed}"]
    words += [f"--mutation '{arguments.mutation}'"] if arguments.mutation else []
    command = f"python -m tests.e2e.chaos {' '.join(words)}"
    os.environ[MUTATION] = arguments.mutation
    began_s = time.monotonic()

    def say(what: str) -> None:
        print(f"[{time.monotonic() - began_s:6.1f} s] {what}", flush=True)

    say(f"{command} ({'network and mounts of its own' if is_own else 'without a network of its own'})")
    tempfile.tempdir = str(folder)
    campaign = Campaign(arguments.store, arguments.seed, minutes=minutes, folder=folder, is_own=is_own, say=say)
    limit_s = _LONGEST_SHARE * 60 * minutes + _LONGEST_EXTRA_S
    try:
        asyncio.run(asyncio.wait_for(campaign.run(), limit_s))
    except BaseException:
        _keep(folder, arguments.keep)
        raise
    if campaign.findings:
        _keep(folder, arguments.keep)
    return _conclude(campaign, command, time.monotonic() - began_s)


def _conclude(campaign: Campaign, command: str, wall_s: float) -> int:
    print(json.dumps(campaign.report, indent=1))
    for finding in campaign.findings:
        print(f"  {finding}")
    verdict = "FAIL" if campaign.findings else "ok  "
    print(f"{verdict} {len(campaign.findings)} findings in {wall_s:.0f} s. Again: {command}")
    return 1 if campaign.findings else 0


def _keep(folder: Path, kept: Path | None) -> None:
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        for name in ("storm", "calm"):
            if (folder / name).is_dir():
                shutil.copytree(folder / name, kept / name, dirs_exist_ok=True)


def _may_isolate() -> bool:
    tried = subprocess.run([*_UNSHARE, "ip", "link", "set", "lo", "up"], check=False, capture_output=True)
    return tried.returncode == 0


# Everything in it ends with its first process, and nobody outside reaches what listens in it.
_UNSHARE: Final = ("unshare", "--net", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child=KILL")


def _isolated(folder: str) -> int:
    """Runs the same command in a network, mounts and processes of its own."""
    # The shell stays, as the first process has to reap those whose parents ended before them.
    inner = f'ip link set lo up && "$0" -B -m tests.e2e.chaos {_INSIDE} {folder} "$@"; exit $?'
    command = ["setpriv", "--pdeathsig=KILL", *_UNSHARE, "sh", "-c", inner, sys.executable, *sys.argv[1:]]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
