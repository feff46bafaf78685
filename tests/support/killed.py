"""Code that is killed in its middle."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any


def killed(call: Callable[[], object], module: Any, name: str, count: int) -> bool:
    """Makes the call in a forked process that SIGKILL ends after call number `count` of a module's function.

    Returns whether it was killed.
    """
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    function, left = getattr(module, name), count

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal left
        result = function(*args, **options)
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    try:
        setattr(module, name, counted)
        call()
    finally:
        os._exit(0)
