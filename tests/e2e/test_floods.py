"""A client that floods by mistake costs the others at most half of their merges a second, and the syncer 1 GiB."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import grpc
import numpy as np
import pytest

from tests.e2e.floods import CARELESS, FLOODS
from tests.support.made_keys import make_keys, tls_of
from tests.support.raw_learner import RawLearner, connected, create_run, layout, pull
from tests.support.serve_process import serve_process

pytestmark = [pytest.mark.e2e, pytest.mark.alone, pytest.mark.timeout(300)]

_HONEST: Final = "honest"
_HOST: Final = "127.0.0.1"
_STEPS_S: Final = 0.1  # of the training between two deltas
_PEACE_S: Final = 4.0
_FLOOD_S: Final = 8.0


class Honest:
    """Pushes a delta, waits until it is merged and pulls the new version, ten times a second if it can."""

    def __init__(self) -> None:
        self.merges = 0

    async def train(self, port: int, keys: Path) -> None:
        async with connected(port, tls_of(keys, _HONEST)) as stubs:
            run, _ = await create_run(stubs)
            learner = RawLearner(stubs, run, _HONEST, random.Random(0))
            await learner.attach()
            base = await pull(stubs, run, "body")
            values = np.ones(layout("body").numel, np.float32)
            while True:
                training = asyncio.create_task(asyncio.sleep(_STEPS_S))
                try:
                    await learner.push(learner.header(base, "body"), values)
                    await learner.event("version_committed")
                    base = await pull(stubs, run, "body", base=base)
                except (grpc.aio.AioRpcError, TimeoutError):
                    await asyncio.sleep(0.1)
                else:
                    self.merges += 1
                await training

    async def merges_a_second(self, duration_s: float) -> float:
        before, began_s = self.merges, time.monotonic()
        await asyncio.sleep(duration_s)
        return (self.merges - before) / (time.monotonic() - began_s)


@asynccontextmanager
async def flooded(name: str, port: int, keys: Path) -> AsyncIterator[None]:
    """Floods as long as the context lasts."""
    words = (sys.executable, "-m", "tests.e2e.floods", name, str(port), str(keys))
    process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"begun\n"
        await asyncio.sleep(2)  # what it prepares
        yield
        assert process.returncode is None, "the flood ended by itself, so this says nothing"
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize("name", FLOODS)
async def test_a_learner_has_half_of_its_merges_beside_a_client_that_floods(name: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    make_keys(keys, "--server", _HOST, "--learner", _HONEST, "--learner", CARELESS)
    options = ["--tls-cert", f"{keys}/{_HOST}.pem", "--tls-key", f"{keys}/{_HOST}.key"]
    options += ["--tls-client-ca", f"{keys}/ca.pem"]
    honest = Honest()
    async with serve_process((tmp_path / "store").as_uri(), tmp_path, *options) as serve, asyncio.TaskGroup() as tasks:
        training = tasks.create_task(honest.train(serve.port, keys))
        await asyncio.sleep(2)
        peace = await honest.merges_a_second(_PEACE_S)
        async with flooded(name, serve.port, keys):
            beside = await honest.merges_a_second(_FLOOD_S)
        training.cancel()
        mib = serve.peak_mib()
    print(f"{name}: {beside:.1f} merges a second beside it, {peace:.1f} in peace; the syncer had {mib:.0f} MiB")
    assert peace > 1
    assert beside >= peace / 2
    assert mib < 1024
