"""Stopped processes get no time, killed ones no `finally`, and the clock jumps."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest

from skerry_syncer.store.errors import ObjectExistsError, StoreError
from tests.simulation.processes import Process, ProcessLoop
from tests.simulation.shared_store import SharedStore, StoreFaults, StoreLink
from tests.simulation.virtual_time import DeadlockError


def _run(main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=ProcessLoop) as runner:
        runner.run(main)


def test_hours_pass_in_no_time_until_nothing_would_ever_happen_again() -> None:
    async def main() -> None:
        await asyncio.sleep(36_000)
        assert asyncio.get_running_loop().time() == pytest.approx(36_000)
        await asyncio.get_running_loop().create_future()

    with pytest.raises(DeadlockError):
        _run(main())


def test_a_stopped_process_gets_no_time_until_it_goes_on() -> None:
    async def main() -> None:
        ticks: list[float] = []

        async def tick() -> None:
            while True:
                await asyncio.sleep(1)
                ticks.append(asyncio.get_running_loop().time())

        process = Process("ticking")
        process.start(tick())
        await asyncio.sleep(2.5)
        process.stop()
        await asyncio.sleep(10)
        assert len(ticks) == 2
        process.go_on()
        await asyncio.sleep(1.1)
        assert ticks[2:] == [pytest.approx(12.5), pytest.approx(13.5)]

    _run(main())


def test_a_killed_process_runs_nothing_not_even_a_finally_until_it_is_buried() -> None:
    async def main() -> None:
        process = Process("doomed")
        link = StoreLink(SharedStore(lambda: 0), process, StoreFaults(), random.Random(0))
        link.kill_after(1, before=True)
        ended: list[str] = []

        async def work() -> None:
            try:
                await asyncio.sleep(5)
            finally:
                ended.append("finally")
                await link.create("name", b"data")  # which can't kill it again

        task = process.start(work())
        await asyncio.sleep(1)
        process.kill()
        task.cancel()
        await asyncio.sleep(10)
        assert ended == []
        process.bury()
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.wait([task])
        assert ended == ["finally"]

    _run(main())


def test_a_write_lands_though_its_writer_was_killed_when_it_was_sent() -> None:
    async def main() -> None:
        store = SharedStore(lambda: 0)
        process = Process("writer")
        link = StoreLink(store, process, StoreFaults(), random.Random(0))
        link.kill_after(1, before=False)
        task = process.start(link.create("name", b"data"))
        await asyncio.sleep(1)
        assert not process.is_alive
        assert await store.objects.get("name") == b"data"
        process.bury()
        task.cancel()

    _run(main())


def test_a_create_that_lands_late_overwrites_nothing() -> None:
    async def main() -> None:
        store = SharedStore(lambda: 0)
        link = StoreLink(store, Process("writer"), StoreFaults(late=1.0), random.Random(0))
        with pytest.raises(StoreError):
            await link.create("name", b"late")
        link.faults = StoreFaults()
        await link.create("name", b"first")
        await asyncio.sleep(60)
        assert await link.get("name") == b"first"
        with pytest.raises(ObjectExistsError):
            await link.create("name", b"second")

    _run(main())
