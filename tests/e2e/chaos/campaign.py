"""One campaign: a storm from a seed, a calm after it, and the verdict on both."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tests.e2e.chaos.deployment import UNTOUCHED, Deployment
from tests.e2e.chaos.journal import Account
from tests.e2e.chaos.store_place import store_place
from tests.e2e.chaos.storm import Storm
from tests.e2e.chaos.watcher import CALM_S
from tests.simulation.auditor import Finding

_JOIN_S: Final = 120.0
_END_S: Final = 60.0
# What starting, calming down and ending take in any campaign; and when it ends, whatever hangs.
_BESIDE_S: Final = 60.0
_LEAST_STORM_S: Final = 20.0
_LONGEST_SHARE: Final = 2.0
_LONGEST_EXTRA_S: Final = 240.0
_LEAST_CALM_S: Final = 20.0
# A step in the storm against one in the calm, by median; and how long one may be held up in the product, where a
# processor was free for it: a learner copies a fragment there, and other threads of its process have the interpreter.
_STEP_SHARE: Final = 0.05
_STALL_S: Final = 0.1


class Campaign:
    """A storm on one kind of store."""

    def __init__(self, kind: str, seed: int, *, duration_s: float, folder: Path, say: Callable[[str], None]) -> None:
        self.findings: list[Finding] = []
        self.report: dict[str, Any] = {}
        self._kind = kind
        self._seed = seed
        self._duration_s = duration_s
        self._folder = folder
        self._say = say

    async def run(self) -> None:
        """Runs it, and finds what is wrong."""
        async with (
            asyncio.timeout(_LONGEST_SHARE * self._duration_s + _LONGEST_EXTRA_S),
            store_place(self._kind, self._folder) as place,
            Deployment(place, self._folder, seed=self._seed, say=self._say) as on,
        ):
            await self._storm(on)

    async def _storm(self, on: Deployment) -> None:
        watcher = on.watcher
        if not await on.tend_until(watcher.has_begun, _JOIN_S):
            self._say("not everybody has joined")
        storm_s = max(_LEAST_STORM_S, self._duration_s - _BESIDE_S)
        self._say(f"storm of {storm_s:.0f} s on {self._kind}, seed {self._seed}")
        begin_s = time.monotonic()
        await Storm(on, self._seed).run(storm_s)
        self._say("calm: everything is healed")
        calm_s = time.monotonic()
        watcher.begin_calm()
        if not await on.tend_until(watcher.has_calmed, CALM_S):
            self._say(f"not calm in time: {watcher.still_open}")
        await on.tend(_LEAST_CALM_S - (time.monotonic() - calm_s))
        end_s = time.monotonic()
        await on.end(_END_S)
        self._say("audit")
        self.findings += await watcher.audit_all()
        self.report |= {"faults": dict(sorted(on.faults.items())), "run": watcher.counts()}
        (account,) = [account for account in watcher.accounts if account.record.learner == f"learner-{UNTOUCHED}"]
        self.findings += self._held_up(account, (begin_s, calm_s, end_s))

    def _held_up(self, account: Account, times_s: tuple[float, float, float]) -> Iterator[Finding]:
        """Yields what is wrong with the untouched learner's steps, between the storm's begin and end and the calm's."""
        begin_s, calm_s, end_s = times_s
        ended_s, cycle_s, stall_s = account.times()
        is_storm, is_calm = (begin_s < ended_s) & (ended_s < calm_s), (calm_s < ended_s) & (ended_s < end_s)
        storm_ms, calm_ms = _median_ms(cycle_s[is_storm]), _median_ms(cycle_s[is_calm])
        longest_ms = 1000 * float(stall_s[is_storm | is_calm].max(initial=0))
        self.report["untouched_learner"] = {
            "step_ms": {"storm": storm_ms, "calm": calm_ms},
            "longest_in_product_ms": longest_ms,
        }
        rule = "the untouched learner's steps take what they take in a calm"
        if not storm_ms < (1 + _STEP_SHARE) * calm_ms:
            yield Finding(rule, f"median {storm_ms} ms in the storm, {calm_ms} ms after it")
        if longest_ms > 1000 * _STALL_S:
            yield Finding(rule, f"one was held up for {longest_ms} ms")


def _median_ms(durations_s: NDArray[np.float32]) -> float:
    """Returns nan where there is none."""
    return float(np.median(durations_s)) * 1000 if len(durations_s) else float("nan")
