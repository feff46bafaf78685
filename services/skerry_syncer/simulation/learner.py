"""A learner in virtual time: it counts steps, stops when a chip fails, and exchanges fragments as a real one does.

It follows `skerry.exchange.fragment`: a delta is taken at a step boundary when it is due, when a round gathers, or just
before one if the learner is slow; while it is on its way or not merged, no other one is sent; new versions are adopted
at a boundary. Steps between two boundaries at which something may happen are not events, which is what makes it fast.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random
from typing import Final, Protocol

from skerry.algorithm.schedule import RoundRhythm, first_contributions
from skerry.wire.policy import Policy
from skerry_syncer.rounds.membership import LearnerReport
from skerry_syncer.simulation.scenario import Region
from skerry_syncer.store.log.entries import AcceptedItem

TOKENS_PER_STEP: Final = 1000
# Of a step: what times lose by rounding.
_ROUNDING: Final = 1e-6
# Of the usual step time: no round is faster.
_LEAST_PACE: Final = 0.1


class Exchange(Protocol):
    """What carries a learner's deltas and versions, and tells the time."""

    now_s: float

    def at_boundary(self, learner: SimulatedLearner, at_s: float) -> None:
        """Calls the learner's `boundary` then."""

    def push(self, learner: SimulatedLearner, item: AcceptedItem) -> None:
        """Sends a delta, and calls `acknowledged` or `returned`."""

    def pull(self, learner: SimulatedLearner, fragment: str, version: int) -> None:
        """Fetches a version, and calls `pulled`."""


@dataclass
class FragmentExchange:
    """One fragment's exchange, with the version that is adopted."""

    version: int
    contributed_step: int
    sent_until: int
    newest: int
    invited: int = -1
    pulled: int = -1  # the version that is adopted at the next boundary
    is_pulling: bool = False
    used_base: int = -1  # from which the syncer takes no delta
    delta: AcceptedItem | None = None  # on its way, or not in the adopted version
    is_acknowledged: bool = False
    merged_in: int = -1  # the version that holds the delta
    rhythm: RoundRhythm = field(default_factory=RoundRhythm)


class SimulatedLearner:
    """One learner, which trains from `attach` to `detach` but for pauses."""

    def __init__(self, name: str, region: Region, policy: Policy, seed: int, exchange: Exchange) -> None:
        """Starts without a session."""
        self.name, self.region = name, region
        self.session = ""
        self.is_attached = False
        self.fragments: dict[str, FragmentExchange] = {}
        self._policy, self._exchange = policy, exchange
        self._random = Random(f"{seed}/{name}/pace")
        self._session_count = self._delta_count = 0
        self.is_training = False
        self._steps, self._since_s = 0, 0.0  # while it trains: at `_since_s`
        self._step_s, self._round_end = region.step_s, 0
        self._boundary_s = math.inf  # the next one at which something may happen

    @property
    def step_count(self) -> int:
        """Steps taken by now."""
        if not self.is_training:
            return self._steps
        return self._steps + int((self._exchange.now_s - self._since_s) / self._step_s + _ROUNDING)

    @property
    def outstanding_step_count(self) -> float:
        """Steps that may still be merged; of fragments, the mean."""
        steps = self.step_count
        counts = [
            steps - f.sent_until + (f.delta.step_count if f.delta is not None and f.merged_in < 0 else 0)
            for f in self.fragments.values()
        ]
        return sum(counts) / max(1, len(counts))

    def report(self) -> LearnerReport:
        """Returns what it tells of itself."""
        steps = self.step_count
        return LearnerReport(steps, steps * TOKENS_PER_STEP, self._step_s)

    def attach(self, versions: dict[str, int]) -> None:
        """Begins a session with these versions of all fragments."""
        self._session_count += 1
        self.session, self.is_attached = f"{self.name}-{self._session_count}", True
        starts = first_contributions(len(versions), self._policy.inner_step_count)
        self.fragments = {
            name: FragmentExchange(version, self._steps + start, self._steps, newest=version)
            for (name, version), start in zip(versions.items(), starts, strict=True)
        }
        self.resume()

    def detach(self) -> None:
        """Ends the session; what was not sent is lost."""
        self.pause()
        self.is_attached, self.fragments = False, {}

    def pause(self) -> None:
        """Stops; the step that it is in is lost."""
        self._steps = self.step_count
        self.is_training, self._boundary_s = False, math.inf

    def resume(self) -> None:
        """Trains on."""
        if self.is_attached and not self.is_training:
            self.is_training, self._since_s = True, self._exchange.now_s
            self._schedule()

    def boundary(self) -> None:
        """Does what is due at a step boundary."""
        if not self.is_training or self._exchange.now_s < self._boundary_s - _ROUNDING:
            return  # it was paused, or what was due came to be due later
        steps = self._steps = self.step_count
        self._since_s, self._boundary_s = self._exchange.now_s, math.inf
        if steps >= self._round_end:
            self._round_end = steps + self._policy.inner_step_count
            self._step_s = self.region.step_s * max(_LEAST_PACE, self._random.gauss(1.0, self.region.jitter))
        for name, fragment in self.fragments.items():
            if fragment.pulled >= 0:
                self._adopt(name, fragment)
            if self._due_step(fragment) <= steps:
                self._send(name, fragment)
        self._schedule()

    def round_opened(self, name: str, version: int, run_step_count: float) -> None:
        """Hears that a round gathers deltas."""
        fragment = self.fragments[name]
        if version > fragment.invited:
            fragment.invited = version
            full = self._policy.inner_step_count
            fragment.rhythm.opened(self.step_count, run_step_count, inner_step_count=full)
            self._schedule()

    def version_made(self, name: str, version: int) -> None:
        """Hears of a new version."""
        self.fragments[name].newest = max(version, self.fragments[name].newest)
        self._pull(name)

    def acknowledged(self, name: str) -> None:
        """Hears that the log has the delta."""
        self.fragments[name].is_acknowledged = True
        self._pull(name)

    def merged(self, name: str, version: int) -> None:
        """Hears that a version holds the delta."""
        self.fragments[name].merged_in = version

    def returned(self, name: str, *, is_base_used: bool) -> None:
        """Hears that the delta is not merged: its work is to be sent again, after adopting a newer version."""
        fragment = self.fragments[name]
        assert fragment.delta is not None
        fragment.sent_until -= fragment.delta.step_count
        fragment.delta, fragment.used_base = None, fragment.version if is_base_used else -1
        self._pull(name)
        self._schedule()

    def pulled(self, name: str, version: int) -> None:
        """Has a version, to be adopted at the next boundary."""
        self.fragments[name].pulled = version
        self._schedule()

    def _pull(self, name: str) -> None:
        fragment = self.fragments[name]
        is_sending = fragment.delta is not None and not fragment.is_acknowledged
        if fragment.newest > fragment.version and not fragment.is_pulling and not is_sending:
            fragment.is_pulling = True
            self._exchange.pull(self, name, fragment.newest)

    def _adopt(self, name: str, fragment: FragmentExchange) -> None:
        fragment.version, fragment.pulled, fragment.is_pulling = fragment.pulled, -1, False
        if fragment.delta is not None and 0 <= fragment.merged_in <= fragment.version:
            fragment.contributed_step, fragment.delta = fragment.delta.last_step, None
        self._pull(name)

    def _due_step(self, fragment: FragmentExchange) -> float:
        """Returns the step at whose end a delta of the fragment is taken, if nothing happens before."""
        if fragment.delta is not None or fragment.is_pulling or fragment.used_base == fragment.version:
            return math.inf
        full, next_step = self._policy.inner_step_count, fragment.sent_until + 1
        due_step = max(fragment.contributed_step + full, next_step)
        if not self._policy.has_waiting_rounds:
            return due_step
        if fragment.invited > fragment.newest:
            return next_step
        rhythm = fragment.rhythm
        if rhythm.opened_step is None or rhythm.interval is None:
            return due_step
        first = max(next_step, rhythm.opened_step + int(rhythm.interval) - 1)
        near = (step for step in (first, first + 1, first + 2) if rhythm.is_near(step, inner_step_count=full))
        return min(due_step, next(near, due_step))

    def _send(self, name: str, fragment: FragmentExchange) -> None:
        self._delta_count += 1
        step_count = self._steps - fragment.sent_until
        fragment.sent_until, fragment.is_acknowledged, fragment.merged_in = self._steps, False, -1
        fragment.delta = AcceptedItem(
            delta=f"{self.name}/{self._delta_count}",
            fragment=name,
            learner=self.name,
            session=self.session,
            base_version=fragment.version,
            base_digest=str(fragment.version),
            digest="",
            parts=(),
            step_count=step_count,
            token_count=step_count * TOKENS_PER_STEP,
            last_step=self._steps,
            squared_norms=(1.0,),
        )
        self._exchange.push(self, fragment.delta)

    def _schedule(self) -> None:
        """Asks for the next boundary at which something may happen."""
        if not self.is_training:
            return
        steps = self.step_count
        is_pulled = any(fragment.pulled >= 0 for fragment in self.fragments.values())
        due = steps + 1 if is_pulled else min(self._round_end, *map(self._due_step, self.fragments.values()))
        boundary_s = self._since_s + (max(due, steps + 1) - self._steps) * self._step_s
        if boundary_s < self._boundary_s:
            self._boundary_s = boundary_s
            self._exchange.at_boundary(self, boundary_s)
