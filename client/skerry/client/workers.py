"""Where work that would hold up the event loop runs: beside it in threads, or inline in a simulation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

R = TypeVar("R")


class Workers(Protocol):
    """Runs functions that take processor time."""

    async def run(self, function: Callable[..., R], *args: Any) -> R:
        """Returns `function(*args)`."""


class ThreadWorkers:
    """Threads of their own; NumPy, zstd and SHA-256 let go of the interpreter while they work."""

    def __init__(self, thread_count: int = 1) -> None:
        self._executor = ThreadPoolExecutor(thread_count, thread_name_prefix="skerry-worker")

    async def run(self, function: Callable[..., R], *args: Any) -> R:
        """Returns `function(*args)`, from a worker thread."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *args)

    def close(self) -> None:
        """Ends the threads after what they are doing."""
        self._executor.shutdown(wait=True, cancel_futures=True)


class InlineWorkers:
    """Runs everything where it is asked for: no threads, one history."""

    async def run(self, function: Callable[..., R], *args: Any) -> R:
        """Returns `function(*args)`, at once."""
        return function(*args)
