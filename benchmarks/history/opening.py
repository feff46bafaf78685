"""Opens a run in a process of its own and tells what that took."""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.history.delayed import DelayedObjects
from benchmarks.history.synthesis import RUN, UID
from skerry.runtime.clock import SystemClock
from skerry.runtime.identifiers import SystemEntropy
from skerry.runtime.workers import ThreadWorkers
from skerry_syncer.store.objects.interface import Objects
from skerry_syncer.store.objects.opening import open_objects
from skerry_syncer.store.store import Store


def open_elsewhere(root: Path, *, delay_s: float) -> dict[str, float]:
    """Returns the seconds, bytes and position of opening the run of the store at `root` in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.history", "--child", str(root), "--delay-ms", str(1000 * delay_s)]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return found


async def open_here(root: Path, *, delay_s: float) -> dict[str, float]:
    """Opens the run as a replica does and returns what it took."""
    objects: Objects = open_objects(root.as_uri(), new=False)
    if delay_s:
        objects = DelayedObjects(objects, delay_s)
    workers = ThreadWorkers(2)
    store = Store(objects, clock=SystemClock(), entropy=SystemEntropy(), workers=workers, writer="benchmark")
    before = resident_bytes()
    started, started_cpu = time.perf_counter(), time.process_time()
    log = await store.open_log(RUN, UID)
    found = {
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - started_cpu,
        "position": float(log.state.position),
        "before_bytes": before,
        "resident_bytes": resident_bytes(),
        "peak_bytes": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024),
    }
    await store.close()
    workers.close()
    return found


def child(root: Path, delay_s: float) -> None:
    """Opens the run and prints what it took as JSON."""
    sys.stdout.write(json.dumps(asyncio.run(open_here(root, delay_s=delay_s))))


def resident_bytes() -> float:
    """Returns what this process has in memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "VmRSS":
            return float(value.split()[0]) * 1024
    raise ValueError("kernel does not tell the resident size")
