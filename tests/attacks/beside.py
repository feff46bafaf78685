"""One honest learner beside an attack: what it gets through, and what the server takes meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
import numpy as np
import psutil

from tests.attacks.crowds import PREPARATIONS
from tests.attacks.target import HONEST, Target, roles
from tests.support.raw_learner import QUICK, RawLearner, create_run, layout, pull
from tests.support.serve_process import serve_process

# For how long an attack is measured at least: parts that hold memory for nothing are given up after 12 s, so in less
# time there may be no merge at all.
_LEAST_S: Final = {"slow-sessions": 20.0}
# For how long peace is measured at most.
_PEACE_S: Final = 3.0
# Of the server's memory.
MOST_MIB: Final = 700


class Honest:
    """Pushes a delta, waits until it is merged and pulls the new version, again and again."""

    def __init__(self) -> None:
        self.merges = 0
        self.times_s: list[float] = []

    async def train(self, target: Target) -> None:
        async with target.connected(HONEST) as stubs:
            run, _ = await create_run(stubs, policy=QUICK)
            learner = RawLearner(stubs, run, HONEST, random.Random(0))
            await learner.attach()
            base = await pull(stubs, run, "body")
            values = np.ones(layout("body").numel, np.float32)
            while True:
                began_s = time.monotonic()
                try:
                    await learner.push(learner.header(base, "body"), values)
                    await learner.event("version_committed")
                    base = await pull(stubs, run, "body", base=base)
                except (grpc.aio.AioRpcError, TimeoutError):
                    await asyncio.sleep(0.1)
                    continue
                self.times_s.append(time.monotonic() - began_s)
                self.merges += 1

    async def measured(self, seconds: float) -> tuple[float, float]:
        """Returns merges a second, and the p99 of the time for one in ms (the whole time if there was none)."""
        before, self.times_s = self.merges, []
        await asyncio.sleep(seconds)
        times_s = self.times_s or [seconds]
        return (self.merges - before) / seconds, 1000 * float(np.quantile(times_s, 0.99))


@dataclass(frozen=True)
class Row:
    """What an attack cost the honest learner and the server."""

    name: str
    peace: float  # merges a second
    attacked: float
    p99_ms: float  # of a merge beside the attack
    mib: float
    told: str  # what the attacker was told, as JSON; empty: it ended by itself

    def is_held(self, least_rate: float) -> bool:
        """Whether the attack took place, and the learner had so many merges a second and the server its memory."""
        return bool(self.told) and self.attacked >= least_rate and self.mib < MOST_MIB

    def __str__(self) -> str:
        told = self.told or "the attacker ended by itself, so this row says nothing"
        return f"{self.name:20}{self.peace:9.1f}{self.attacked:9.1f}{self.p99_ms:9.0f}{self.mib:8.0f}  {told}"


def _peak_mib(pid: int) -> float:
    """Returns the most memory that a process had, of Linux; elsewhere what it has."""
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        return float(psutil.Process(pid).memory_info().rss / 2**20)
    (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 2**10


async def beside(name: str, seconds: float, *, has_roles: bool = False) -> Row:
    """Measures some seconds in peace, and so many under the attack; with roles, every client has a certificate."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys" if has_roles else None
        options = [] if keys is None else roles(keys)
        async with serve_process((Path(folder) / "store").as_uri(), Path(folder), *options) as serve:
            target = Target(serve.port, keys)
            honest = Honest()
            training = asyncio.create_task(honest.train(target))
            await asyncio.sleep(1)
            peace, _ = await honest.measured(min(seconds / 2, _PEACE_S))
            if name in PREPARATIONS:
                await PREPARATIONS[name](target, serve.store_url)
            attacker = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.attacks", "--as", name, "--port", str(serve.port)),
                *(() if keys is None else ("--keys", str(keys))),
                stdout=asyncio.subprocess.PIPE,
            )
            await asyncio.sleep(1.5)  # until it has begun
            attacked, p99_ms = await honest.measured(max(seconds, _LEAST_S.get(name, 0.0)))
            memory = _peak_mib(serve.pid)
            with contextlib.suppress(ProcessLookupError):
                attacker.send_signal(signal.SIGTERM)
            told = (await attacker.communicate())[0].decode().strip()
            training.cancel()
            await asyncio.wait([training])
    return Row(name, peace, attacked, p99_ms, memory, told if attacker.returncode == 0 else "")
