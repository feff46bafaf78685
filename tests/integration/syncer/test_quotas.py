"""The rate of one client's transfers, however they follow each other."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from skerry_syncer.access import limits as quotas
from skerry_syncer.access.limits import Turns

RATE, STEP_BYTES, STEPS = 2**20, 2**13, 50
EARLY_S = quotas._RATE_BURST_S + quotas._RATE_PAUSE_S
CLIENT = "a"


async def _transfer(turns: Turns, steps: int) -> None:
    source = random.Random(steps)
    for _ in range(steps):
        await turns.take(CLIENT, STEP_BYTES)
        for _ in range(source.randrange(3)):  # reads, copies and waits for a client, outside its turn
            await asyncio.sleep(0)


async def _many_others(turns: Turns) -> None:
    for number in range(100 * STEPS):
        await turns.take(f"other-{number}", 1)


@pytest.mark.parametrize("transfers", [1, 2, 5])
@pytest.mark.parametrize("others", [False, True])
async def test_a_client_has_its_rate_however_many_transfers_it_cuts_its_bytes_into(
    transfers: int, others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quotas, "_MOST_KNOWN", 4)
    turns = Turns(RATE)
    begun_s = time.monotonic()
    background = asyncio.create_task(_many_others(turns)) if others else None
    await asyncio.gather(*(_transfer(turns, STEPS // transfers) for _ in range(transfers)))
    assert time.monotonic() - begun_s >= STEPS * STEP_BYTES / RATE - EARLY_S
    if background:
        background.cancel()
    for number in range(10):  # one behind the other, which no transfer of the client overlaps
        begun_s = time.monotonic()
        await _transfer(turns, STEPS // 5)
        assert time.monotonic() - begun_s >= STEPS / 5 * STEP_BYTES / RATE - EARLY_S, number


async def test_clients_that_owe_nothing_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "_MOST_KNOWN", 4)
    turns = Turns(RATE)
    for number in range(100):
        await turns.take(str(number), 1)
        await asyncio.sleep(quotas._RATE_BURST_S / 10)
    assert len(turns._lines) < 50


async def test_what_an_answer_costs_is_paid_by_the_calls_after_it() -> None:
    turns = Turns(100.0, burst_s=0.1)
    await turns.take(CLIENT, 1)
    turns.charge(CLIENT, 40)
    begun_s = time.monotonic()
    await turns.take("other", 1)
    assert time.monotonic() - begun_s < 0.2
    await turns.take(CLIENT)  # costs nothing itself
    assert 0.25 < time.monotonic() - begun_s < 0.6
