"""One run on one replica: tails the log, decides, merges, and tells its followers. No gRPC and no sockets.

Three loops run beside the calls. *Tailing* folds what other replicas wrote; *deciding* asks the round engine after
every entry, report and timer, and proposes to the log what it says; *advising* exchanges leases with other replicas
through the store. Merges are tasks of their own. Nothing here is true that the log does not say, so all of it may die
at any moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog

from skerry.runtime.clock import Clock
from skerry.runtime.workers import Workers
from skerry.store.errors import LogCorruptError, StoreError
from skerry.store.log.entries import INITIAL_BASE, Decided, Entry, Fate, Item, RunStatus, SessionItem
from skerry.store.log.fold import RunState
from skerry.store.log.run_log import RunLog
from skerry.store.log.state import Outcome
from skerry.store.versions.replay import UnreadableDeltaError
from skerry.syncer.advice import AdviceBoard, exchange_leases
from skerry.syncer.errors import DrainingError, SyncerError
from skerry.syncer.events import (
    Draining,
    Event,
    EventKind,
    LearnerRecord,
    LearnerReport,
    LearnerSeen,
    RoundOpened,
    events_of,
)
from skerry.syncer.followers import EventStream, Followers
from skerry.syncer.membership import Membership
from skerry.syncer.merger import Merger
from skerry.syncer.participation import closed_round
from skerry.syncer.rounds import MergeKey, RoundEngine

_LOG: Final = structlog.get_logger(__name__)


@dataclass(frozen=True)
class ReplicaSettings:
    """How one replica spends its time and memory on a run."""

    busy_poll_s: float = 0.05  # between looks for others' entries while a round is open
    idle_poll_s: float = 1.0  # at most, while none is
    retry_s: float = 0.5  # after the store failed
    stream_limit_bytes: int = 2**20  # of events that a follower has not taken


class RunReplica:
    """Serves one run; `run` keeps it alive, everything else may be called from any task of the loop."""

    def __init__(
        self,
        log: RunLog,
        *,
        clock: Clock,
        workers: Workers,
        merger: Merger,
        advice: AdviceBoard,
        settings: ReplicaSettings,
    ) -> None:
        """Takes a log that is folded to its end."""
        self.log = log
        self.workers = workers
        self.membership = Membership(clock.monotonic_s())
        self._clock = clock
        self._merger = merger
        self._advice = advice
        self._settings = settings
        self._engine = RoundEngine()
        self._followers = Followers(settings.stream_limit_bytes)
        self._announced: dict[str, int] = {}  # by fragment: the version whose round followers were told of
        self._live: set[str] = set()  # learners whose lease lived at the last decision
        self._decide_now = asyncio.Event()
        self._tail_now = asyncio.Event()
        self._waiting: dict[asyncio.Event, None] = {}
        self._has_open_round = False
        self._is_draining = False
        self._has_ended = False
        self._tasks: asyncio.TaskGroup | None = None
        self._merge_count = 0
        self._merges_ended = asyncio.Event()
        self._merges_ended.set()
        self._seeding: dict[str, asyncio.Lock] = {}
        self._unsubscribe = log.subscribe(self._on_entry)

    @property
    def state(self) -> RunState:
        """The run as far as it is folded here."""
        return self.log.state

    @property
    def is_idle(self) -> bool:
        """Whether nobody follows, nothing is merged and no round gathers: it may be closed and opened again later."""
        is_used = bool(self._followers or self._waiting)
        return not is_used and self._merge_count == 0 and not self._is_busy()

    async def run(self) -> None:
        """Serves until cancelled.

        Raises:
            LogCorruptError: the store lost or changed what was durable; followers were told.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                tasks.create_task(self._tail(), name="tail")
                tasks.create_task(self._decide(), name="decide")
                tasks.create_task(self._advise(), name="advise")
        except* LogCorruptError as errors:
            error = errors.exceptions[0]
            self.end_followers(SyncerError("STORE_ROLLED_BACK", str(error)))
            raise
        finally:
            self._tasks = None
            self._has_ended = True
            self._unsubscribe()
            self._followers.close(DrainingError())
            self._wake_waiting()

    # Followers

    @contextmanager
    def attached(self, learner: str, session: str) -> Iterator[EventStream]:
        """Yields the events for an attached learner, until it leaves the context."""
        with self._followers.following(learner, session) as stream:
            known = self.state.learners[learner]
            if known.session != session:  # fenced since its own entry was folded
                stream.end(_fenced(learner))
            self._tell(LearnerSeen(self.membership.record(self.state, learner, self._clock.monotonic_s())))
            yield stream

    @contextmanager
    def watching(self) -> Iterator[EventStream]:
        """Yields the events for an observer, until it leaves the context."""
        with self._followers.following() as stream:
            yield stream

    def end_followers(self, error: SyncerError) -> None:
        """Ends every stream with `error`."""
        self._followers.end(error)

    def _tell(self, kind: EventKind) -> None:
        """Tells followers of something that is not in the log."""
        self._followers.tell(Event(self.state.position, kind))

    # What calls tell

    def report(self, learner: str, session: str, report: LearnerReport | None) -> None:
        """Takes a sign of life, with what the learner says of itself."""
        now_s = self._clock.monotonic_s()
        self.membership.renew(learner, session, now_s, report)
        if report is not None:
            self._tell(LearnerSeen(self.membership.record(self.state, learner, now_s)))
        self._decide_now.set()

    def leave(self, learner: str, session: str) -> None:
        """Takes a learner's goodbye, which is in the log."""
        self.membership.end(learner, session)
        self._decide_now.set()

    def push_begun(self, fragment: str, learner: str, session: str, step_count: int) -> None:
        """Takes an admissible push's first message: of H steps or more, it opens the round for everybody at once."""
        self.membership.renew(learner, session, self._clock.monotonic_s())
        if step_count >= self.state.policy.inner_step_count:
            known = self.state.fragments[fragment]
            self._announce(fragment, known.version + (1 if known.closing is None else 2))

    def learner_records(self) -> tuple[LearnerRecord, ...]:
        """Returns every learner that the log knows, as observers see it now."""
        return self.membership.records(self.state, self._clock.monotonic_s())

    def open_rounds(self) -> tuple[Event, ...]:
        """Returns the announcements of the rounds that gather now, for a learner that has just come."""
        view = self.membership.view(self.state, self._clock.monotonic_s())
        return tuple(
            Event(self.state.position, RoundOpened(fragment, version))
            for fragment, version in self._engine.open_rounds(self.state, view)
        )

    async def attach(self, item: SessionItem) -> None:
        """Makes the session the learner's newest, if it is not.

        Raises:
            SyncerError: the run takes no learners, or a newer session fences this one.
        """
        rejection = self.state.check(item)
        if rejection is not None and rejection.reason == "REPEATED":
            return
        (outcome,) = await self.log.append([item])
        if outcome.rejection is not None and outcome.rejection.reason != "REPEATED":
            raise SyncerError(outcome.rejection.reason, outcome.rejection.detail)

    async def wait_until(self, holds: Callable[[RunState], bool]) -> None:
        """Returns when `holds(state)` is true; it is asked after every entry.

        Raises:
            DrainingError: the replica goes away first, or failed.
        """
        news = asyncio.Event()
        self._waiting[news] = None
        try:
            while not holds(self.state):
                if self._is_draining or self._has_ended:
                    raise DrainingError
                news.clear()
                await news.wait()
        finally:
            del self._waiting[news]

    async def seed(self, fragment: str) -> None:
        """Makes version 0 of the draft's fragment, if its initial weights are there; idempotent."""
        async with self._seeding.setdefault(fragment, asyncio.Lock()):
            await self._merger.seed(fragment)

    async def drain(self, grace_s: float) -> None:
        """Tells followers, closes no further round, and returns when merges have ended."""
        self._is_draining = True
        self._tell(Draining(grace_s))
        self._followers.close(DrainingError())
        self._decide_now.set()
        self._wake_waiting()
        await self._merges_ended.wait()

    # The fold's news

    def _on_entry(self, entry: Entry, outcomes: tuple[Outcome, ...]) -> None:
        """Tells followers at once, and wakes whoever waits for change."""
        for event in events_of(self.state, entry, outcomes):
            self._followers.tell(event)
        for outcome in outcomes:
            if outcome.rejection is None and isinstance(outcome.item, SessionItem):
                self._fence(outcome.item)
            for delta in outcome.decided:
                if delta.fate is not Fate.MERGED:  # its round may have come to nothing; the next is told of anew
                    self._announced.pop(delta.item.fragment, None)
        self._decide_now.set()
        self._tail_now.set()
        self._wake_waiting()

    def _fence(self, item: SessionItem) -> None:
        self._followers.end(_fenced(item.learner), learner=item.learner, but_session=item.session)
        self.membership.forget_others(self.state)

    def _wake_waiting(self) -> None:
        for news in self._waiting:
            news.set()

    # Tailing

    def _is_busy(self) -> bool:
        return self._has_open_round or any(fragment.closing for fragment in self.state.fragments.values())

    async def _tail(self) -> None:
        """Folds others' entries: at once after an own append, often while a round is open, else ever more seldom."""
        wait_s = self._settings.busy_poll_s
        while True:
            self._tail_now.clear()
            before = self.state.position
            try:
                await self.log.tail()
            except LogCorruptError:
                raise
            except StoreError as error:
                _LOG.warning("log could not be read", run=self.log.spec.name, cause=str(error))
                wait_s = self._settings.retry_s
            else:
                is_quiet = self.state.position == before and not self._is_busy()
                wait_s = min(2 * wait_s, self._settings.idle_poll_s) if is_quiet else self._settings.busy_poll_s
            await _wait(self._tail_now, wait_s)

    # Deciding

    async def _decide(self) -> None:
        while True:
            self._decide_now.clear()
            now_s = self._clock.monotonic_s()
            view = self.membership.view(self.state, now_s)
            decisions = self._engine.decide(self.state, view, now_s, may_close=not self._is_draining)
            self._tell_of_leases({name for name, learner in view.learners.items() if learner.is_live}, now_s)
            open_rounds = self._engine.open_rounds(self.state, view)
            self._has_open_round = bool(open_rounds)
            for fragment, version in open_rounds:
                self._announce(fragment, version)
            for key in decisions.merges:
                self._start(partial(self._merge, key))
            self._start_seeds()
            if decisions.items and await self._propose(decisions.items):
                continue
            wakes = (decisions.wake_at_s, self.membership.next_change_s(self.state, now_s))
            wake_at_s = min((at_s for at_s in wakes if at_s is not None), default=None)
            await _wait(self._decide_now, None if wake_at_s is None else max(0.0, wake_at_s - now_s))

    async def _propose(self, items: tuple[Item, ...]) -> bool:
        """Puts what was decided into the log; returns whether anything came of it."""
        before = self.state.position
        try:
            await self.log.append(items)
        except LogCorruptError:
            raise
        except StoreError as error:
            _LOG.warning("decision could not be written", run=self.log.spec.name, cause=str(error))
            await self._clock.sleep(self._settings.retry_s)
            return True
        return self.state.position != before

    def _tell_of_leases(self, live: set[str], now_s: float) -> None:
        """Tells observers of learners whose lease ran out or came back."""
        for learner in sorted(live ^ self._live):
            self._tell(LearnerSeen(self.membership.record(self.state, learner, now_s)))
        self._live = live

    def _announce(self, fragment: str, version: int) -> None:
        if self._announced.get(fragment, 0) < version:
            self._announced[fragment] = version
            self._tell(RoundOpened(fragment, version))

    # Merging

    def _start(self, work: Callable[[], Awaitable[None]]) -> None:
        assert self._tasks is not None  # decisions are made inside `run`
        self._merge_count += 1
        self._merges_ended.clear()
        self._tasks.create_task(self._counted(work))

    async def _counted(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        finally:
            self._merge_count -= 1
            if self._merge_count == 0:
                self._merges_ended.set()
            self._decide_now.set()

    async def _merge(self, key: MergeKey) -> None:
        """Merges until the set is committed, by whomever, or closed again; a draining replica hands it on."""
        try:
            while self._waits_for_merge(key):
                try:
                    await self._merger.merge(key)
                    if self._merger.wants_snapshot(key.fragment):
                        await self._merger.snapshot(key.fragment)
                except UnreadableDeltaError as error:
                    await self._close_again(key, error)
                except LogCorruptError:
                    raise
                except StoreError as error:
                    _LOG.warning("merge failed", fragment=key.fragment, version=key.version, cause=str(error))
                    if self._is_draining:
                        return
                    await self._clock.sleep(self._settings.retry_s)
        finally:
            self._engine.merge_ended(key, self._clock.monotonic_s())

    def _waits_for_merge(self, key: MergeKey) -> bool:
        closing = self.state.fragments[key.fragment].closing
        return closing is not None and (closing.version, closing.attempt) == (key.version, key.attempt)

    async def _close_again(self, key: MergeKey, error: UnreadableDeltaError) -> None:
        """Freezes the round's set anew, without the delta that can't be read; without any left, the round is void."""
        fragment = self.state.fragments[key.fragment]
        closing = fragment.closing
        if closing is None or not self._waits_for_merge(key):
            return
        if all(member.delta != error.delta for member in closing.members):
            raise LogCorruptError(
                f"a delta of an older version can't be read, nor can later ones be made. fragment={key.fragment}, "
                f"cause={error}"
            ) from error
        _LOG.warning(
            "delta can't be read; closing its round without it",
            fragment=key.fragment,
            delta=error.delta,
            cause=str(error),
        )
        members = tuple(member for member in closing.members if member.delta != error.delta)
        view = self.membership.view(self.state, self._clock.monotonic_s())
        item = closed_round(
            self.state,
            fragment,
            view,
            members,
            attempt=closing.attempt + 1,
            decided=(Decided(error.delta, Fate.QUARANTINED, "its stored parts can't be read"),),
        )
        self._engine.adopt_close(item)
        if not await self._propose((item,)):
            await self._clock.sleep(self._settings.retry_s)

    def _start_seeds(self) -> None:
        """Turns initial weights that were pushed into versions 0, so that a commit of the draft finds them done."""
        if self.state.status is not RunStatus.DRAFT or self._is_draining:
            return
        for name, fragment in sorted(self.state.fragments.items()):
            if fragment.version == INITIAL_BASE and fragment.pending and name not in self._seeding:
                self._start(partial(self._seed_quietly, name))

    async def _seed_quietly(self, fragment: str) -> None:
        try:
            await self.seed(fragment)
        except StoreError as error:  # the commit of the draft tries again and reports
            _LOG.warning("initial weights could not be stored", fragment=fragment, cause=str(error))

    # Advising

    async def _advise(self) -> None:
        """Exchanges leases with other replicas, three times a term."""
        while True:
            try:
                if await exchange_leases(self._advice, self.membership, self._clock.monotonic_s()):
                    self._decide_now.set()
            except StoreError as error:
                _LOG.warning("leases could not be exchanged", run=self.log.spec.name, cause=str(error))
            await self._clock.sleep(self.state.policy.lease_term_s / 3)


def _fenced(learner: str) -> SyncerError:
    return SyncerError("SESSION_FENCED", f"a newer session of this learner attached. learner={learner}")


async def _wait(event: asyncio.Event, timeout_s: float | None) -> None:
    """Returns when the event is set, or after `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        pass
