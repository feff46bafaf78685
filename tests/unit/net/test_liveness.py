"""Which replicas a client gives up, by who answers and who does not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from skerry.errors import SkerryError
from skerry.net import liveness
from skerry.net.liveness import Liveness, Vigil


class FakeReplica:
    """A replica with one call, which answers questions over its own and over fresh connections, or never."""

    def __init__(self, name: str, *, answers: bool, answers_afresh: bool) -> None:
        self.name = name
        self.life = Liveness()
        self.calls: set[Any] = {"a call"}
        self.errors: list[str] = []
        self.answers, self.answers_afresh = answers, answers_afresh

    async def serves(self, *, is_fresh: bool) -> bool:
        """Answers, or waits for ever."""
        if not (self.answers_afresh if is_fresh else self.answers):
            await asyncio.Event().wait()
        return True

    async def give_up(self, error: SkerryError) -> None:
        """Ends its call."""
        self.errors.append(str(error))
        self.calls.clear()


@pytest.fixture(autouse=True)
def _short_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "TICK_S", 0.001)


async def watch(*replicas: FakeReplica, until: Callable[[], bool]) -> None:
    """Watches the replicas until something holds."""
    vigil = Vigil(replicas)
    vigil.begin()
    async with asyncio.timeout(10):
        while not until():
            await asyncio.sleep(0.001)
    await vigil.end()


async def test_a_silent_replica_is_given_up_once_another_one_answers_and_gets_calls_again_when_it_does() -> None:
    silent = FakeReplica("a", answers=False, answers_afresh=False)
    other = FakeReplica("b", answers=True, answers_afresh=True)
    await watch(silent, other, until=lambda: silent.life.is_lost)
    assert "answering=b" in silent.errors[0]
    assert other.errors == []
    silent.answers_afresh = True
    await watch(silent, other, until=lambda: not silent.life.is_lost)


async def test_a_replica_that_answers_afresh_gets_its_calls_anew() -> None:
    alone = FakeReplica("a", answers=False, answers_afresh=True)
    await watch(alone, until=lambda: not alone.calls)
    assert "answering=a fresh connection" in alone.errors[0]
    assert not alone.life.is_lost


@pytest.mark.parametrize("answers", [True, False])
async def test_a_replica_that_answers_and_one_that_is_silent_as_all_are_keep_their_calls(*, answers: bool) -> None:
    replicas = [FakeReplica(name, answers=answers, answers_afresh=False) for name in ("a", "b")]
    ticks = iter(range(50))
    await watch(*replicas, until=lambda: next(ticks) == 49)
    assert [replica.errors for replica in replicas] == [[], []]
