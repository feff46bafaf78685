"""An event loop in one background thread, for callers that are not asynchronous."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from skerry.net.forks import OwnProcess

R = TypeVar("R")


class LoopThread:
    """Runs coroutines for synchronous callers. A daemon thread, so a forgotten `close` keeps no process alive.

    A forked child does not have the thread: it runs nothing there, and there is nothing to close.
    """

    def __init__(self, name: str) -> None:
        self.process = OwnProcess()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def start(self, coroutine: Coroutine[Any, Any, R]) -> Future[R]:
        """Starts a coroutine on the loop; its result is the future's.

        Raises:
            StopExchangingError: FORKED.
            RuntimeError: the thread was closed.
        """
        if self.is_over:
            coroutine.close()
        self.process.check()
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def call(self, function: Callable[[], R]) -> R:
        """Returns what the function returns, called on the loop."""

        async def called() -> R:
            return function()

        return self.run(called())

    def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Returns the coroutine's result; an interrupt of the waiting caller cancels it."""
        future = self.start(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    @property
    def is_over(self) -> bool:
        """Whether nothing can run: the thread was closed, or this is a forked child."""
        return self.process.is_forked or self.loop.is_closed()

    def close(self) -> None:
        """Cancels what runs and ends the thread. Idempotent."""
        if self.process.is_forked or not self._thread.is_alive():
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            self.loop.run_until_complete(_cancel_others())
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self.loop.close()


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
