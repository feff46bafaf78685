"""`python -m tests.attacks [--only NAME] [--seconds N]`: one honest learner beside each attack, and a table."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Final

import grpc
import numpy as np
import psutil

from tests.attacks.attacks import ATTACKS
from tests.doubles.no_cloud import stay_here
from tests.syncer.raw_learner import QUICK, RawLearner, connected, create_run, layout, pull
from tests.syncer.serve_process import serve_process


class Honest:
    """Pushes a delta, waits until it is merged and pulls the new version, again and again."""

    def __init__(self) -> None:
        self.merges = 0
        self.times_s: list[float] = []

    async def train(self, port: int) -> None:
        async with connected(port) as stubs:
            run, _ = await create_run(stubs, policy=QUICK)
            learner = RawLearner(stubs, run, "honest", random.Random(0))
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


# What must hold: merges a second beside an attack, of ten in peace on two cores, and the server's memory.
_LEAST_RATE: Final = 5.0
_PEACE_RATE: Final = 10.0
_MOST_MIB: Final = 700


async def row(name: str, seconds: float) -> tuple[bool, str]:
    """Returns whether the server held out, and the row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        async with serve_process((Path(folder) / "store").as_uri(), Path(folder)) as serve:
            honest = Honest()
            training = asyncio.create_task(honest.train(serve.port))
            await asyncio.sleep(1)
            peace, _ = await honest.measured(seconds)
            attacker = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.attacks", "--as", name, "--port", str(serve.port)),
                stdout=asyncio.subprocess.PIPE,
            )
            await asyncio.sleep(1.5)  # until it has begun
            attacked, p99_ms = await honest.measured(seconds)
            memory = psutil.Process(serve.pid).memory_info().rss / 2**20
            with contextlib.suppress(ProcessLookupError):
                attacker.send_signal(signal.SIGTERM)
            told = (await attacker.communicate())[0].decode().strip()
            has_attacked = attacker.returncode == 0
            told = told if has_attacked else "the attacker ended by itself, so this row says nothing"
            training.cancel()
            await asyncio.wait([training])
    is_held = has_attacked and attacked >= _LEAST_RATE * peace / _PEACE_RATE and memory < _MOST_MIB
    return (
        is_held,
        f"{name:16}{peace:9.1f}{attacked:9.1f}{p99_ms:9.0f}{memory:8.0f}  {told}",
    )


async def attack(name: str, port: int) -> None:
    """Attacks until SIGTERM, and prints what it was told."""
    told = Counter[str]()
    attacking: asyncio.Task[None] = asyncio.create_task(ATTACKS[name](port, told))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, attacking.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await attacking
    print(json.dumps(told))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.attacks", description=__doc__)
    parser.add_argument("--only", choices=ATTACKS, help="one attack")
    parser.add_argument("--seconds", type=float, default=10.0, help="in peace, and under each attack")
    parser.add_argument("--as", dest="name", choices=ATTACKS, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    stay_here()
    if given.name:
        asyncio.run(attack(given.name, given.port))
        return
    print(f"{'attack':16}{'peace/s':>9}{'attack/s':>9}{'p99 ms':>9}{'MiB':>8}  what it was told", flush=True)
    failed = []
    for name in [given.only] if given.only else ATTACKS:
        is_held, text = asyncio.run(row(name, given.seconds))
        print(text, flush=True)
        failed += [] if is_held else [name]
    if failed:
        sys.exit(f"fewer than half of the merges in peace, or {_MOST_MIB} MiB and more, beside {', '.join(failed)}")


if __name__ == "__main__":
    main()
