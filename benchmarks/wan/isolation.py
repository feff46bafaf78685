"""Runs a benchmark in a network, mounts and processes of its own, of which nothing is left when it ends.

Network namespaces, links, queueing disciplines and processes end with the first process in there, so also after Ctrl-C
and after SIGKILL.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Final

from benchmarks.report import DIRECTORY

INSIDE: Final = "--inside"
_PROGRAMS: Final = ("unshare", "setpriv", "ip", "tc", "mount")
_UNSHARE: Final = ("unshare", "--net", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child=KILL")
# /run is private, because `ip netns` keeps its namespaces there.
_PREPARED: Final = "mount -t tmpfs none /run && mkdir /run/netns && ip link set lo up"


def _obstacle() -> str:
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


def isolated(module: str, prepare: Callable[[], object] = lambda: None) -> int:
    """Runs `python -m module --inside FOLDER` with this process's arguments in there, and returns its exit status.

    What has to be done in the network of the machine, `prepare` does before.
    """
    if reason := _obstacle():
        print(f"{module} can't measure here: {reason}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was begun is ended and removed
    prepare()
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="run-", dir=DIRECTORY.parent, ignore_cleanup_errors=True) as folder:
        # The shell stays, as the first process has to reap those whose parents ended before them.
        inner = f'{_PREPARED} && "$0" -B -m {module} {INSIDE} "$@"; exit $?'
        command = ["setpriv", "--pdeathsig=KILL", *_UNSHARE, "sh", "-c", inner, sys.executable, folder, *sys.argv[1:]]
        with subprocess.Popen(command) as process:
            try:
                return process.wait()
            except KeyboardInterrupt:
                return 130
            finally:
                process.kill()
