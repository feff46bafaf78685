"""Which replicas hang: calls go away from one that answers nothing while another way to the run answers.

A replica may be stopped, stuck or cut off without any connection breaking. While it has calls, something of it is heard
every two seconds, because a client that hears nothing for so long asks for its health over the connection of small
calls. Whatever it says, and every message of any call, is a sign of life, so a call may take any time at a replica
whose event loop runs, and bulk that arrives slowly is no silence.

Silence alone proves nothing: the client's own link may be down or full. After two seconds the client also asks the
other replicas, and the same one over a fresh connection. A replica is given up if it is silent for five seconds and one
of those answered a question that was put later than the first unanswered one. All calls that it has then fail, so that
they are repeated elsewhere, and it gets no new ones until it answers. If nobody answers, calls go on waiting: a client
of one address changes nothing while that hangs.

Time is counted in ticks of the client's own event loop, so that a client that was stopped itself blames nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
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
    asked: int | None = None  # tick of the first question since then
    served: int = -1  # tick of the last question that was answered with SERVING
    has_fresh: bool = False  # whether a fresh connection answers
    question: asyncio.Task[None] | None = None
    fresh_question: asyncio.Task[None] | None = None

    def heard(self) -> None:
        """Takes note of a sign of life."""
        self.silence, self.asked, self.is_lost = 0, None, False


class Watched(Protocol):
    """A replica whose life is watched."""

    life: Liveness

    @property
    def name(self) -> str:
        """What log lines and errors call it."""

    @property
    def is_called(self) -> bool:
        """Whether it has calls that are not over."""

    async def serves(self, *, is_fresh: bool) -> bool:
        """Returns once it has answered, over its connection for small calls or a fresh one, whether it takes calls.

        Raises:
            SkerryError: the question could not be put, or nobody answered it.
        """

    async def give_up(self, error: SkerryError, *, has_fresh: bool) -> None:
        """Fails its calls with `error` and closes its connections, except the fresh one if that answers."""

    async def drop_fresh(self) -> None:
        """Closes the fresh connection."""


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
        tasks = [self._watching]
        for replica in self._replicas:
            tasks += [replica.life.question, replica.life.fresh_question]
        await _cancelled(*tasks)

    async def _watch(self) -> None:
        while any(one.is_called or one.life.is_lost for one in self._replicas):
            await asyncio.sleep(TICK_S)
            await self._look()

    async def _look(self) -> None:
        self._tick += 1
        replicas = list(self._replicas)
        for one in replicas:
            one.life.silence = one.life.silence + 1 if one.is_called or one.life.is_lost else 0
        suspects = [one for one in replicas if one.is_called and not one.life.is_lost and one.life.silence > _ASK]
        for one in replicas:
            life, is_concerned = one.life, one.is_called or one.life.is_lost
            if suspects or (is_concerned and life.silence >= _ASK):
                life.asked = self._tick if life.asked is None else life.asked
                life.question = _running(life.question, self._ask(one, self._tick))
            if one in suspects:
                life.fresh_question = _running(life.fresh_question, self._ask_afresh(one))
            elif life.fresh_question is not None:
                await self._forget_fresh(one)
        for one in suspects:
            if one.life.silence >= _GIVE_UP and (witness := self._witness(one, replicas)):
                await self._give_up(one, witness)

    @staticmethod
    def _witness(suspect: Watched, replicas: Iterable[Watched]) -> str:
        """Returns who answered a later question than the suspect's first; empty: nobody."""
        asked = suspect.life.asked
        assert asked is not None  # suspects are asked
        if suspect.life.has_fresh:
            return "a fresh connection"
        return next((one.name for one in replicas if one is not suspect and one.life.served > asked), "")

    async def _give_up(self, suspect: Watched, witness: str) -> None:
        life, has_fresh = suspect.life, suspect.life.has_fresh
        facts = {"replica": suspect.name, "silent_s": life.silence * TICK_S, "answering": witness}
        _log.warning("a replica hangs, its calls are repeated elsewhere", **facts)
        await _cancelled(life.question, life.fresh_question)
        life.heard()
        life.is_lost, life.has_fresh, life.question, life.fresh_question = not has_fresh, False, None, None
        told = ", ".join(f"{name}={value}" for name, value in facts.items())
        error = error_of("UNREACHABLE", f"the replica answers nothing, so the call goes elsewhere. {told}")
        await suspect.give_up(error, has_fresh=has_fresh)

    async def _ask(self, replica: Watched, tick: int) -> None:
        life = replica.life
        try:
            serves = await replica.serves(is_fresh=False)
        except SkerryError:
            return  # its connection is down, so its calls fail by themselves
        if life.is_lost:
            _log.info("a replica answers again", replica=replica.name)
        life.heard()
        if serves:
            life.served = tick

    async def _ask_afresh(self, replica: Watched) -> None:
        with suppress(SkerryError):
            replica.life.has_fresh = await replica.serves(is_fresh=True)

    @staticmethod
    async def _forget_fresh(replica: Watched) -> None:
        life = replica.life
        await _cancelled(life.fresh_question)
        life.has_fresh, life.fresh_question = False, None
        await replica.drop_fresh()


def _running(task: asyncio.Task[None] | None, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Returns a task that does the work, or the one that still does what was begun."""
    if task is None or task.done():
        return asyncio.create_task(work)
    work.close()
    return task


async def _cancelled(*tasks: asyncio.Task[None] | None) -> None:
    """Returns once the tasks have ended, which are cancelled."""
    ended = [task for task in tasks if task is not None]
    for task in ended:
        task.cancel()
    if ended:
        await asyncio.wait(ended)
