"""A console on a real socket in a thread of its own, and a run whose learners do what a test says."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import uvicorn
from google.protobuf.duration_pb2 import Duration

from skerry import RunsClient, Tls
from skerry.net.loop_thread import LoopThread
from skerry.v1 import exchange_pb2 as exchange
from skerry.v1 import types_pb2 as types
from skerry_console.app import Console, application
from skerry_console.serving import server_options
from skerry_console.view import Settings
from tests.support.raw_learner import RawLearner, attached, connected, create_run, quick

_LEASE: Final = Duration(seconds=2)


@contextmanager
def console(
    target: str, *, webhook_url: str | None = None, allows_actions: bool = False, tls: Tls | None = None
) -> Iterator[str]:
    """Yields the URL of a console of that syncer."""
    settings = Settings(prices={}, allows_actions=allows_actions)
    with _serving(Console(lambda: RunsClient(target), settings, webhook_url=webhook_url), tls) as url:
        yield url


@contextmanager
def console_of(connect: Callable[[], Any]) -> Iterator[str]:
    """Yields the URL of a console whose clients `connect` makes."""
    with _serving(Console(connect, Settings(prices={}))) as url:
        yield url


@contextmanager
def _serving(served: Console, tls: Tls | None = None) -> Iterator[str]:
    app = application(served, hosts=["127.0.0.1"])
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, **server_options(tls or Tls())))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="console")
        thread.start()
        try:
            yield f"http{'s' if tls else ''}://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)


@dataclass
class _Connected:
    """A learner on a connection of its own, which reports before its lease runs out."""

    learner: RawLearner
    connection: Any
    report: types.LearnerReport
    beat: asyncio.Task[None] | None = None


class ScriptedRun:
    """A run of two fragments in which every push makes a version; its learners are made when they first act."""

    def __init__(self, target: str, name: str) -> None:
        self.name = name
        self._thread = LoopThread(name)
        self._learners: dict[str, _Connected] = {}
        self._port = int(target.rpartition(":")[2])
        self._run = self._thread.run(self._create())

    def close(self) -> None:
        """Ends every connection without a word."""
        for learner_id in list(self._learners):
            self.kill(learner_id)
        self._thread.close()

    def advance(self, learner_id: str, *, loss: float | None = None) -> None:
        """Makes the next version of `body` with a delta of that learner alone, which reports it."""
        self._thread.run(self._advance(learner_id, loss))

    def kill(self, learner_id: str) -> None:
        """Breaks a learner's connection, as the death of its process does."""
        self._thread.run(self._kill(self._learners.pop(learner_id)))

    async def _create(self) -> types.Run:
        async with connected(self._port) as stubs:
            run, _ = await create_run(stubs, self.name, policy=quick(lease_term=_LEASE))
            return run

    async def _advance(self, learner_id: str, loss: float | None) -> None:
        if learner_id not in self._learners:
            connection = connected(self._port)
            learner = await attached(await connection.__aenter__(), self._run, learner_id)
            self._learners[learner_id] = _Connected(learner, connection, types.LearnerReport())
        known = self._learners[learner_id]
        version = (await known.learner.advance()).version_committed.version
        known.report = _report(known.learner.step, version, loss)
        if known.beat is not None:
            known.beat.cancel()
        known.beat = asyncio.create_task(self._beat(known))

    async def _beat(self, known: _Connected) -> None:
        while True:
            await known.learner.call.write(exchange.AttachRequest(report=known.report))
            await asyncio.sleep(_LEASE.seconds / 4)

    async def _kill(self, known: _Connected) -> None:
        if known.beat is not None:
            known.beat.cancel()
        await known.connection.__aexit__(None, None, None)


def _report(step: int, adopted: types.FragmentVersion, loss: float | None) -> types.LearnerReport:
    return types.LearnerReport(
        step_count=step,
        token_count=100 * step,
        step_time=Duration(nanos=50_000_000),
        loss=4.0 / (1.0 + step / 20) if loss is None else loss,
        sent_bytes=500 * step,
        received_bytes=700 * step,
        adopted=[adopted],
    )
