"""One campaign: a storm from a seed, a calm run of as many merged tokens, and the verdict on both."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, SupportsFloat

import numpy as np

from tests.e2e.chaos.deployment import Deployment
from tests.e2e.chaos.director import Director
from tests.e2e.chaos.points import Deed
from tests.e2e.chaos.schedule import UNTOUCHED, draw
from tests.e2e.chaos.store_place import StorePlace, store_place
from tests.e2e.chaos.watcher import CALM_S, Learned
from tests.e2e.machine import find
from tests.simulation.auditor import Finding

Say = Callable[[str], None]

_LOOK_EVERY_S: Final = 5.0
_JOIN_S: Final = 120.0
_END_S: Final = 60.0
# The share of the time that the storm has, beyond what starting, calming down and learning on take in any campaign; the
# calm run needs less, since nothing stops it.
_STORM_SHARE: Final = 0.55
_BESIDE_S: Final = 70.0
_LEAST_STORM_S: Final = 20.0
_LOSS_SHARE: Final = 0.01
# Of each fragment: a short storm may leave a run with a few long rounds, and a dozen outer steps do not come as far as
# the same tokens in four times as many. While the loss still falls, the run of more versions is ahead: at 40 of each
# fragment a storm was up to 1 % above its calm run.
_LEAST_VERSION: Final = 60
# After all has calmed: the first rounds then merge what learners trained while they were cut off.
_LATER_VERSIONS: Final = 20
_LEARN_S: Final = 90.0
# A step in the storm against one in the calm run, by median; and how long one may be held up in the product, where a
# processor was free for it: a learner copies a fragment there, and other threads of its process have the interpreter.
_STEP_SHARE: Final = 0.05
_STALL_S: Final = 0.1
_FIRST_STEPS: Final = 20
# Ends of processes that nobody asked for, after which the product is broken and the storm teaches nothing.
_MOST_COMPLAINTS: Final = 5


@dataclass(frozen=True)
class Outcome:
    """What a run has learned, and the untouched learner's times."""

    learned: Learned
    times: dict[str, float]


class Campaign:
    """A storm, and the calm run after it."""

    def __init__(self, kind: str, seed: int, *, minutes: float, folder: Path, is_own: bool, say: Say) -> None:
        """On a store of this kind, in about so many minutes; `is_own`: in network and mounts of our own."""
        self.findings: list[Finding] = []
        self.report: dict[str, Any] = {}
        self._kind = kind
        self._seed = seed
        self._minutes = minutes
        self._folder = folder
        self._is_own = is_own
        self._say = say

    async def run(self) -> None:
        """Runs both, and finds what is wrong."""
        with store_place(self._kind, self._folder, may_mount=self._is_own) as place:
            storm_s = max(_LEAST_STORM_S, _STORM_SHARE * (60 * self._minutes - _BESIDE_S))
            storm = await self._storm(place, storm_s)
            self._say(f"calm run until {min(storm.learned.tokens.values(), default=0)} tokens are merged")
            calm = await self._calm(place, storm.learned.tokens, 60 * self._minutes)
        self.findings += compare_losses(storm.learned, calm.learned)
        self.findings += compare_times(storm.times, calm.times)
        self.report["loss"] = {"storm": round(storm.learned.loss, 5), "calm": round(calm.learned.loss, 5)}
        self.report["untouched_learner"] = {"storm": storm.times, "calm": calm.times}

    async def _storm(self, place: StorePlace, storm_s: float) -> Outcome:
        self._say(f"storm of {storm_s:.0f} s on {self._kind}, seed {self._seed}")
        plan = draw(self._seed, storm_s)
        async with Deployment(place, self._folder / "storm", seed=self._seed, schedule=plan, say=self._say) as on:
            watcher = on.watcher
            if not await _look_until(on, watcher.has_begun, _JOIN_S):
                self._say("not everybody has joined")
            async with _told_of(on):
                await Director(on, may_drop=self._is_own and find("iptables") is not None).storm(plan, storm_s)
                self._say("calm: everything is healed")
                watcher.begin_calm()
                if not await _look_until(on, watcher.has_calmed, CALM_S):
                    self._say(f"not calm in time: {watcher.still_open}")
                wanted = max(_LEAST_VERSION, watcher.least_version() + _LATER_VERSIONS)
                await _look_until(on, lambda: watcher.least_version() >= wanted, _LEARN_S)
            await on.end(_END_S)
            self._say("audit")
            self.findings += await watcher.audit_all()
            struck, every = on.points()
            self.report["faults"] = dict(sorted(on.faults.items()))
            for deed in Deed:
                counts = [sum(point.deed is deed for point in points) for points in (struck, every)]
                self.report[f"fault_points_{deed}"] = "{} of {}".format(*counts)
            self.report["storm"] = watcher.counts()
            return Outcome(await watcher.learned(), untouched_times(on))

    async def _calm(self, place: StorePlace, tokens: dict[str, int], within_s: float) -> Outcome:
        async with Deployment(place, self._folder / "calm", seed=self._seed, say=self._say) as on, _told_of(on):
            await _look_until(on, lambda: on.watcher.has_merged(tokens), within_s)
            await on.end(_END_S)
            self.findings += [Finding(f"calm run: {one.rule}", one.detail) for one in await on.watcher.audit_all()]
            self.report["calm"] = on.watcher.counts()
            return Outcome(await on.watcher.learned(tokens), untouched_times(on))


async def _look_until(on: Deployment, condition: Callable[[], bool], within_s: float) -> bool:
    """Audits and supervises until the condition holds; returns whether it did in time."""
    deadline_s = time.monotonic() + within_s
    while True:
        await on.watcher.look()
        on.supervise()
        if condition():
            return True
        if time.monotonic() > deadline_s:
            return False
        await asyncio.sleep(1.0)


@asynccontextmanager
async def _told_of(on: Deployment) -> AsyncIterator[None]:
    """Audits and says every few seconds how far the run is, as long as the context lasts."""

    async def tell() -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            await on.watcher.look()
            if len(on.watcher.complaints) > _MOST_COMPLAINTS:  # nothing would come of the rest
                raise RuntimeError(f"processes end by themselves. first={on.watcher.complaints[0]}")
            struck, every = on.points()
            counts = on.watcher.counts()
            on.say(
                f"versions={counts['versions']} deltas={counts['deltas_acknowledged']} steps={counts['steps_audited']} "
                f"points={len(struck)}/{len(every)} findings={len(on.watcher.findings) + len(on.watcher.complaints)}"
            )

    async with asyncio.TaskGroup() as tasks:
        telling = tasks.create_task(tell())
        yield
        telling.cancel()


def untouched_times(on: Deployment) -> dict[str, float]:
    """Returns the untouched learner's times, in milliseconds."""
    (account,) = [one for one in on.watcher.accounts if one.record.learner == f"learner-{UNTOUCHED}"]
    _, cycle_s, stall_s = account.times()
    cycle_s, stall_s = cycle_s[_FIRST_STEPS:], stall_s[_FIRST_STEPS:]
    if not len(cycle_s):
        return {}
    return {
        "steps": len(cycle_s),
        "step_ms_median": _ms(np.median(cycle_s)),
        "step_ms_p99": _ms(np.quantile(cycle_s, 0.99)),
        "in_product_ms_median": _ms(np.median(stall_s)),
        "in_product_ms_p99": _ms(np.quantile(stall_s, 0.99)),
        "in_product_ms_max": _ms(stall_s.max()),
    }


def _ms(seconds: SupportsFloat) -> float:
    return round(1000 * float(seconds), 2)


def compare_losses(storm: Learned, calm: Learned) -> Iterator[Finding]:
    """Yields what is wrong with the storm's loss."""
    short = [name for name, count in storm.tokens.items() if calm.tokens.get(name, 0) < count]
    if short:
        yield Finding("the calm run merges as many tokens", f"it did not of {short} within its time")
    elif storm.loss / calm.loss - 1 > _LOSS_SHARE:
        share = 100 * (storm.loss / calm.loss - 1)
        detail = f"{share:.2f} % above a calm run of as many merged tokens: {storm.loss:.4f}, {calm.loss:.4f}"
        yield Finding("the storm costs no loss", detail)


def compare_times(storm: dict[str, float], calm: dict[str, float]) -> Iterator[Finding]:
    """Yields what is wrong with the untouched learner's steps."""
    if not storm or not calm:
        yield Finding("the untouched learner trains", f"storm={storm}, calm={calm}")
        return
    rule = "the untouched learner's steps take what they take in a calm run"
    if storm["step_ms_median"] > (1 + _STEP_SHARE) * calm["step_ms_median"]:
        yield Finding(rule, f"median {storm['step_ms_median']} ms, calm {calm['step_ms_median']} ms")
    if storm["in_product_ms_max"] > 1000 * _STALL_S:
        yield Finding(rule, f"one was held up for {storm['in_product_ms_max']} ms")
