"""Runs a benchmark in a network, mounts and processes of its own, of which nothing is left when it ends.

Network namespaces, links, queueing disciplines and processes end with the first process in there, so also after Ctrl-C
and after SIGKILL.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

INSIDE: Final = "--inside"
_PROGRAMS: Final = ("unshare", "setpriv", "ip", "tc", "mount")
_UNSHARE: Final = ("unshare", "--net", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child=KILL")
# /run is private, because `ip netns` keeps its namespaces there.
_PREPARED: Final = "mount -t tmpfs none /run && mkdir /run/netns && ip link set lo up"


def obstacle() -> str:
    """Returns why this machine can't make network namespaces with limited links, or an empty text."""
    if os.name != "posix" or not sys.platform.startswith("linux"):
        return "network namespaces exist on Linux only"
    if os.geteuid() != 0:
        return "network namespaces need root; run the command with sudo"
    if missing := [name for name in _PROGRAMS if shutil.which(name) is None]:
        return f"programs are missing; on Debian and Ubuntu: apt install iproute2 util-linux. missing={missing}"
    tried = subprocess.run(
        [*_UNSHARE, "sh", "-c", f"{_PREPARED} && tc qdisc add dev lo root tbf rate 1gbit burst 1mb latency 50ms"],
        check=False,
        capture_output=True,
        text=True,
    )
    return f"this kernel or container refuses. error={tried.stderr.strip()}" if tried.returncode else ""


def run_isolated(module: str, folder: Path, arguments: Sequence[str]) -> int:
    """Runs `python -m module --inside FOLDER ARGUMENTS` in there, and returns its exit status."""
    # The shell stays, as the first process has to reap those whose parents ended before them.
    inner = f'{_PREPARED} && "$0" -B -m {module} {INSIDE} "$@"; exit $?'
    command = ["setpriv", "--pdeathsig=KILL", *_UNSHARE, "sh", "-c", inner, sys.executable, str(folder), *arguments]
    process = subprocess.Popen(command)
    try:
        return process.wait()
    finally:
        process.kill()
        process.wait()
