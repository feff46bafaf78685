"""Which replicas hang: calls go away from one that answers nothing while another way to the run answers.

A replica may be stopped, stuck or cut off without any connection breaking. While it has calls, something of it is heard
every two seconds, because a client that hears nothing for so long asks for its health over the connection of small
calls. Whatever it says, and every message of any call, is a sign of life, so a call may take any time at a replica
whose event loop runs, and bulk that arrives slowly is no silence.

Silence alone proves nothing: the client's own link may be down or full. After two seconds the client also asks every
replica, this one included, over a fresh connection. A replica is given up if it is silent for five seconds and one of
those answered. All calls that it has then fail, so that they are repeated elsewhere, and it gets no new ones until it
answers. If nobody answers, calls go on waiting: a client of one address changes nothing while that hangs.

Time is counted in ticks of the client's own event loop, so that a client that was stopped itself blames nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol

from skerry.errors import SkerryError, error_of
from skerry.runtime.logs import get_logger

_log = get_logger(__name__)

TICK_S: Final = 1.0
# Ticks of silence after which a replica is asked, and then whoever else may answer.
_ASK: Final = 2
# Ticks of silence after which it is given up: a syncer's event loop is never busy for so long.
_GIVE_UP: Final = 5


@dataclass(eq=False)
class Liveness:
    """What a client knows of one replica's life."""

    is_lost: bool = False  # given up, and not heard since
    silence: int = 0  # ticks with calls since anything was heard
    answered: int = 0  # tick of the last question over a fresh connection that was answered
    question: asyncio.Task[None] | None = None
    fresh_question: asyncio.Task[None] | None = None

    def heard(self) -> None:
        """Takes note of a sign of life."""
        self.silence, self.is_lost = 0, False


class Watched(Protocol):
    """A replica whose life is watched."""

    name: str  # in log lines and errors
    life: Liveness

    @property
    def calls(self) -> Collection[Any]:
        """The calls that are still open."""

    async def serves(self, *, is_fresh: bool) -> bool:
        """Returns once it has answered, over its connection for small calls or a fresh one, whether it takes calls.

        Raises:
            SkerryError: the question could not be put, or nobody answered it.
        """

    async def give_up(self, error: SkerryError) -> None:
        """Fails its calls with `error` and closes its connections."""


class Vigil:
    """Watches the replicas of one client while they have calls; for one event loop."""

    def __init__(self, replicas: Iterable[Watched]) -> None:
        """Watches what `replicas` has at each tick."""
        self._replicas = replicas
        self._tick = 0
        self._watching: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Watches from now until no replica has calls and none is given up. Idempotent."""
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())

    async def end(self) -> None:
        """Stops watching."""
        questions = [
            task for replica in self._replicas for task in (replica.life.question, replica.life.fresh_question)
        ]
        tasks = [task for task in (self._watching, *questions) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self) -> None:
        while any(replica.calls or replica.life.is_lost for replica in self._replicas):
            await asyncio.sleep(TICK_S)
            await self._look()

    async def _look(self) -> None:
        self._tick += 1
        replicas = list(self._replicas)
        for replica in replicas:
            life = replica.life
            life.silence = life.silence + 1 if replica.calls and not life.is_lost else 0
        suspects = [replica for replica in replicas if replica.life.silence > _ASK]
        for replica in replicas:
            life = replica.life
            if life.silence >= _ASK:
                life.question = _running(life.question, self._ask(replica))
            if suspects or life.is_lost:
                life.fresh_question = _running(life.fresh_question, self._ask_afresh(replica, self._tick))
        for suspect in suspects:
            first_asked = self._tick - suspect.life.silence + _ASK
            witness = next((replica for replica in (suspect, *replicas) if replica.life.answered > first_asked), None)
            if witness is not None and suspect.life.silence >= _GIVE_UP:
                await self._give_up(suspect, witness)

    @staticmethod
    async def _give_up(suspect: Watched, witness: Watched) -> None:
        life = suspect.life
        answering = "a fresh connection" if witness is suspect else witness.name
        facts = {"replica": suspect.name, "silent_s": life.silence * TICK_S, "answering": answering}
        _log.warning("a replica hangs, its calls are repeated elsewhere", **facts)
        life.silence, life.is_lost = 0, witness is not suspect
        told = ", ".join(f"{name}={value}" for name, value in facts.items())
        await suspect.give_up(
            error_of("UNREACHABLE", f"the replica answers nothing, so the call goes elsewhere. {told}")
        )

    @staticmethod
    async def _ask(replica: Watched) -> None:
        with suppress(SkerryError):  # its connection is down, so its calls fail by themselves
            await replica.serves(is_fresh=False)
            replica.life.heard()

    @staticmethod
    async def _ask_afresh(replica: Watched, tick: int) -> None:
        with suppress(SkerryError):
            if await replica.serves(is_fresh=True):
                replica.life.answered = tick
                if replica.life.is_lost:
                    _log.info("a replica answers again", replica=replica.name)
                    replica.life.heard()


def _running(task: asyncio.Task[None] | None, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Returns a task that does the work, or the one that still does what was begun."""
    if task is None or task.done():
        return asyncio.create_task(work)
    work.close()
    return task
