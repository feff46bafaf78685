"""The table of limits: how long a transfer may take, and how often a client may call."""

from __future__ import annotations

import asyncio

import pytest

from skerry_syncer.access import limits
from skerry_syncer.access.limits import Allowance, patience_s
from skerry_syncer.errors import SyncerError
from tests.simulation.virtual_time import run_virtual


def test_a_transfer_may_take_20_s_and_the_time_at_64_kbit_a_second() -> None:
    assert patience_s(0) == 20
    assert patience_s(4 * 2**20) == 20 + 512


def test_600_calls_come_at_once_and_then_200_a_second() -> None:
    async def main() -> float:
        allowance = Allowance()
        for _ in range(800):
            await allowance.take()
        return asyncio.get_running_loop().time()

    assert run_virtual(main) == pytest.approx(1.0, abs=0.01)


def test_a_call_that_would_wait_for_more_than_a_second_is_refused_after_a_second() -> None:
    async def main() -> None:
        allowance = Allowance()
        allowance.spend(1000 * limits.BYTES_A_CALL)  # 400 more than may come at once
        with pytest.raises(SyncerError) as caught:
            await allowance.take()
        assert caught.value.reason == "QUOTA_EXCEEDED"
        assert caught.value.retry_after_s == pytest.approx(1.0)
        assert asyncio.get_running_loop().time() == pytest.approx(1.0)

    run_virtual(main)


def test_a_message_counts_by_its_bytes() -> None:
    async def main() -> float:
        allowance = Allowance()
        for _ in range(600):
            await allowance.take()
        allowance.spend(2**20)  # 128 calls
        await allowance.take()
        return asyncio.get_running_loop().time()

    assert run_virtual(main) == pytest.approx(128 / 200, abs=0.01)
