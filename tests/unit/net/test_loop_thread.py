from __future__ import annotations

import asyncio
from concurrent.futures import CancelledError

import pytest

from skerry.net.loop_thread import LoopThread


def test_what_comes_after_the_end_is_refused() -> None:
    thread = LoopThread("ended")
    thread.close()
    with pytest.raises(RuntimeError, match="closed"):
        thread.call(lambda: None)


def test_the_end_cancels_what_runs() -> None:
    thread = LoopThread("ending")
    waiting = thread.start(asyncio.sleep(3600.0))
    thread.close()
    with pytest.raises(CancelledError):
        waiting.result(10.0)
