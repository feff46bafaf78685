"""Peak memory of a syncer by learners and by the size of a fragment: version 0, deltas, merge, adoption.

The limit is the fragment's float32 size. What the process held before the run existed is not counted; resident pages
of memory-mapped scratch files are, though the kernel may drop them.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from benchmarks.processes import Served, served
from benchmarks.report import Row, measured
from benchmarks.speed.measuring import Size
from benchmarks.speed.transfer import RUN, create_run, encoded_delta, peer
from skerry import Policy, RunsClient
from skerry.wire.codecs import Codec

_TIMEOUT_S: Final = 120.0


async def _merge(syncer: Served, numel: int, learners: int) -> None:
    policy = Policy(quorum_count=learners, grace_factor=0.0, lease_term_s=60.0)
    run, layout = await asyncio.to_thread(create_run, syncer, numel, policy)
    parts = encoded_delta(layout, Codec.INT4)
    async with AsyncExitStack() as stack:
        peers = [
            await stack.enter_async_context(peer(syncer, run, layout, f"learner-{number}"))
            for number in range(learners)
        ]
        for start in range(0, learners, 4):
            await asyncio.gather(
                *(one.push(one.delta(parts, step_count=policy.inner_step_count)) for one in peers[start : start + 4])
            )
        await asyncio.to_thread(_wait_for_version, syncer)


def _wait_for_version(syncer: Served) -> None:
    deadline_s = time.monotonic() + _TIMEOUT_S
    with RunsClient(syncer.target) as client:
        while client.get_run(RUN).run.versions[0].version < 1:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the round was not merged. timeout_s={_TIMEOUT_S}")
            time.sleep(0.1)


def _row(numel: int, learners: int) -> Row:
    with tempfile.TemporaryDirectory(prefix="skerry-benchmark-") as name, served(Path(name)) as syncer:
        before_bytes = syncer.resident_bytes()
        asyncio.run(_merge(syncer, numel, learners))
        syncer.wait_idle()
        used_bytes = syncer.peak_bytes() - before_bytes
    case = f"{learners} learners, a fragment of {numel / 1e6:.3g}M parameters, int4"
    metric = "peak memory of the syncer / fragment's float32 size"
    return measured(case, metric, [used_bytes / 1e6], "MB", limit=4 * numel / 1e6)


def rows(size: Size) -> Iterator[Row]:
    """2 to 64 learners with one size, and 2 learners with larger fragments."""
    small, *larger = (
        (2_000_000, 4_000_000, 8_000_000) if size.is_quick else (10_000_000, 50_000_000, 200_000_000, 500_000_000)
    )
    for learners in (2, 16, 64):
        yield _row(small, learners)
    for numel in larger:
        yield _row(numel, 2)
