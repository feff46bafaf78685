"""Refused calls: few lines about them in the log, and no more of them in a second than the syncer can afford."""

from __future__ import annotations

import asyncio
from typing import Final

from skerry.runtime.clock import SystemClock
from skerry.runtime.logs import get_logger
from skerry_syncer.access.caller import CALLER
from skerry_syncer.access.limits import Rate

_LOG: Final = get_logger(__name__)
# Lines about refused calls of one address at once: a learner that is refused says why in one or two.
_LINE_BURST: Final = 20
# Refusals that one address is told at once, and the pause between further ones; what comes sooner is told later.
_BURST: Final = 500
_PAUSE_S: Final = 0.02
_HELD_S: Final = 1.0


class Refusals:
    """Logs refused calls, and holds back the answers to addresses that are refused again and again."""

    def __init__(self) -> None:
        """Starts without refusals."""
        self._lines = Rate("lines", SystemClock(), burst=_LINE_BURST, pause_s=1.0)
        self._answers = Rate("refusals", SystemClock(), burst=_BURST, pause_s=_PAUSE_S)
        self._left_out_count = 0

    def log(self, method: str, reason: str, message: str) -> None:
        """Logs some lines at once of each address, then one a second, and how many were left out."""
        caller = CALLER.get()
        if not self._lines.is_due(caller.address):
            self._left_out_count += 1
            return
        facts = {"method": method, "reason": reason, "message": message, "peer": caller.peer}
        if caller.identity:
            facts["identity"] = caller.identity
        _LOG.info("call refused", **facts, left_out_count=self._left_out_count)
        self._left_out_count = 0

    async def hold_back(self) -> None:
        """Returns when the caller may be told: a connection has few calls, so waiting ones keep others away."""
        if not self._answers.is_due(CALLER.get().address):
            await asyncio.sleep(_HELD_S)
