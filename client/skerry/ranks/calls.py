"""Calls to the syncer that the ranks of an island make themselves, each over connections of its own.

The leader has a rank begin one by a task of the shelf. Then it hears from the rank how many bytes have moved, until the
call has ended, and asks for the outcome. Meanwhile the shelf is free for others.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, TypeAlias
from weakref import WeakSet

import torch

from skerry.errors import SkerryError, StopExchangingError, error_of, is_transient
from skerry.exchange.session import Calls
from skerry.net.loop_thread import LoopThread
from skerry.net.retry import Retry, RetrySettings
from skerry.net.transport import LANE_COUNT, Transport
from skerry.ranks.spread import Shelf
from skerry.runtime.identifiers import system_random

_ENDED: Final = -1  # in the place of a count of bytes
_LAST_S: Final = 2.0  # for which a rank that leaves waits for the last reports

CountBytes: TypeAlias = Callable[[int], None]
# Returns what JSON has; raises SkerryError.
RankCall: TypeAlias = Callable[[Calls, CountBytes], Coroutine[Any, Any, Any]]


class RankCalls:
    """One rank's calls, each under the key of what it is about."""

    def __init__(self, shelf: Shelf, open_transport: Callable[[], Transport]) -> None:
        """Every rank of the island makes one, at the same time. `open_transport` is called on an event loop."""
        self.shelf = shelf
        # Ranks share what a syncer takes from one client, and often a link.
        self.lane_count = max(1, LANE_COUNT // shelf.island.size)
        self._open_transport = open_transport
        self._transport: Transport | None = None
        self._thread: LoopThread | None = None
        self._begun: dict[int, Future[Any]] = {}
        self._reporting: WeakSet[threading.Thread] = WeakSet()
        shelf.tasks["outcome"] = self._outcome

    def close(self) -> None:
        """Closes this rank's connections to the syncer, if it has any."""
        if self._thread is not None:
            if self._transport is not None:
                self._thread.run(self._transport.close())
            self._thread.close()
        for thread in () if self.shelf.island.has_left else list(self._reporting):
            thread.join(_LAST_S)

    # At other ranks.

    def begin(self, key: int, call: RankCall) -> None:
        """Begins a call; what it counts is reported to the leader, which must `follow` it."""
        counts: SimpleQueue[int] = SimpleQueue()
        self._thread = self._thread or LoopThread("skerry-rank")
        self._begun[key] = self._thread.start(self._made(call, counts.put))
        self._begun[key].add_done_callback(lambda _: counts.put(_ENDED))
        self._start(self._report, counts, key)

    def _start(self, report: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=report, args=arguments, name="skerry-reports", daemon=True)
        self._reporting.add(thread)
        thread.start()

    async def _made(self, call: RankCall, count_bytes: CountBytes) -> Any:
        if self._transport is None:
            self._transport = self._open_transport()
        retry = Retry(RetrySettings(), system_random(), is_transient)
        return await call(Calls(self._transport, retry, lane_count=self.lane_count), count_bytes)

    def _report(self, counts: SimpleQueue[int], key: int) -> None:
        """Tells the leader of bytes that were moved, until the call has ended."""
        size_bytes = 0
        with suppress(StopExchangingError):
            while size_bytes != _ENDED:
                size_bytes = counts.get()
                self.shelf.island.send(torch.tensor([size_bytes]), 0, self.shelf.group, tag=_tag(key))

    def _outcome(self, *, key: int) -> dict[str, Any]:
        """Returns the result of a call, or reason and message of the error by which it ended."""
        try:
            return {"result": self._begun.pop(key).result()}
        except SkerryError as error:
            return {"error": [error.reason, str(error)]}
        except Exception as error:  # noqa: BLE001 - told to the leader, which does the rank's work itself
            return {"error": ["UNREACHABLE", repr(error)]}

    # At the leader.

    async def follow(self, rank: int, key: int, count_bytes: CountBytes) -> Any:
        """Returns the result of a call that a rank has begun, when it has ended.

        Raises:
            SkerryError: the call's.
        """
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def reported(size_bytes: int) -> None:
            if size_bytes == _ENDED:
                ended.set()
            else:
                count_bytes(size_bytes)

        def listen() -> None:
            for size_bytes in self._reports(rank, key):  # to the last, or the rank would wait to send it
                with suppress(RuntimeError):  # the loop was closed meanwhile
                    loop.call_soon_threadsafe(reported, size_bytes)

        self._start(listen)
        await ended.wait()
        outcome = await self.do("outcome", rank, key=key)
        if "error" in outcome:
            raise error_of(*outcome["error"])
        return outcome["result"]

    def _reports(self, rank: int, key: int) -> Iterator[int]:
        """Yields what the rank reports; in a thread, since it waits for it."""
        report = torch.zeros(1, dtype=torch.int64)
        with suppress(StopExchangingError):  # to ask for the outcome will raise it
            while report != _ENDED:
                self.shelf.island.receive(report, rank, self.shelf.group, tag=_tag(key))
                yield int(report)
            return
        yield _ENDED

    async def do(self, task: str, rank: int, **arguments: Any) -> Any:
        """Has a rank do a task of the shelf, and returns its result, without blocking the event loop."""
        do = partial(self.shelf.do, task, ranks=[rank], **arguments)
        (answer,) = await asyncio.get_running_loop().run_in_executor(None, do)
        return answer


def _tag(key: int) -> int:
    """Returns the tag of the reports on a call; 0 is that of the leader's requests."""
    return 1 + key
