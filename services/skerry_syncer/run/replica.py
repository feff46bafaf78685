"""One run on one replica: follows the log, decides, merges, and sends events to followers. No gRPC and no sockets.

Three loops run beside the calls. *Tailing* folds what other replicas wrote. *Deciding* asks the round engine after
every entry, report and timer, and appends its decisions to the log. *Advising* shares leases with other replicas
through the store. Each merge is a task of its own. All state here is a cache of the log or advice, so the process may
die at any moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final
from weakref import WeakValueDictionary

from skerry.runtime.logs import get_logger
from skerry.v1.types_pb2 import Event, LearnerStatus, RoundOpened
from skerry_syncer.access.caller import calling_learner
from skerry_syncer.errors import DrainingError, SyncerError, from_rejection
from skerry_syncer.merge.merger import Merger
from skerry_syncer.merge.rollback import RollBacks
from skerry_syncer.rounds.closing import closed_without
from skerry_syncer.rounds.engine import RoundEngine
from skerry_syncer.rounds.leases import Leases
from skerry_syncer.rounds.membership import LearnerReport, MembershipView, participants
from skerry_syncer.run.advice import AdviceBoard
from skerry_syncer.run.events import EventStream, Followers, events_of, learner_message, timestamp
from skerry_syncer.run.pace import Pace, wait
from skerry_syncer.run.upkeep import keep_small
from skerry_syncer.settings import ReplicaSettings
from skerry_syncer.store.errors import LogCorruptError, NewerFormatError, StoreError, UnreadableObjectError
from skerry_syncer.store.log.entries import (
    INITIAL_BASE,
    AcceptedItem,
    ClosedItem,
    EjectionItem,
    Entry,
    Fate,
    Item,
    LeftItem,
    RunStatus,
    SessionItem,
)
from skerry_syncer.store.log.fold import check_ejected, check_live
from skerry_syncer.store.log.state import AskedRollback, FragmentState, LearnerState, Outcome, RunState
from skerry_syncer.store.versions.blobs import StoredParts
from skerry_syncer.store.versions.replay import DAMAGE, UnreadableDeltaError
from skerry_syncer.store.versions.run import Run
from skerry_syncer.store.versions.scratch import Scratch

_LOG: Final = get_logger(__name__)


class RunReplica:
    """Serves one run while `run` is running; its other methods may be called from any task of the loop."""

    def __init__(self, run: Run, *, scratch: Scratch, settings: ReplicaSettings) -> None:
        """Takes a run whose log is folded to its end."""
        self.stored = run
        self.log, self.blobs = run.log, run.blobs
        self.merger = Merger(run, scratch)
        self.stored_parts: WeakValueDictionary[tuple[str, str], StoredParts] = WeakValueDictionary()
        self.leases = Leases(run.log.clock.monotonic_s())
        self.followers = Followers(settings.stream_limit_bytes)
        self._clock = run.log.clock
        self._advice = AdviceBoard(run.log)
        self._settings = settings
        self.engine = RoundEngine()
        self._announced: dict[str, int] = {}  # by fragment: the version of the last round that followers were told of
        self._asked_rollback: AskedRollback | None = None  # the last that was begun here
        self._unseeded: list[str] = []  # fragments of a draft whose initial weights were pushed since the last decision
        self._live: set[str] = set()  # learners whose lease was live at the last decision
        self._decide_now = asyncio.Event()
        self._tail_now = asyncio.Event()
        self._advise_now = asyncio.Event()
        self._pace = Pace(run.log.clock)
        self._open_rounds: tuple[tuple[str, int], ...] = ()  # (fragment, version to be made), at the last decision
        self._is_draining = False
        self._tasks: asyncio.TaskGroup | None = None
        self._merges: dict[asyncio.Task[Any], None] = {}
        self.roll_backs = RollBacks(run)
        self._unsubscribe = run.log.subscribe(self._on_entry)

    @property
    def state(self) -> RunState:
        """The run as far as it is folded here."""
        return self.log.state

    def fragment(self, name: str) -> FragmentState:
        """Returns the fragment of that name.

        Raises:
            SyncerError: FRAGMENT_NOT_FOUND.
        """
        if name not in self.state.fragments:
            raise SyncerError("FRAGMENT_NOT_FOUND", f"no such fragment in the run. fragment={name[:80]!r}")
        return self.state.fragments[name]

    async def is_draft(self) -> bool:
        """Whether the run is a draft at the log's end: another replica may have committed it."""
        if self.state.status is RunStatus.DRAFT:
            await self.log.tail()
        return self.state.status is RunStatus.DRAFT

    @property
    def is_idle(self) -> bool:
        """Whether the replica may be closed and opened again later: no follower, no merge and no open round."""
        return not (self.followers or self._merges or self._is_busy())

    async def check_caller(self) -> None:
        """Returns if the client whose call is served is not a learner that was ejected from the run.

        Raises:
            SyncerError: EJECTED.
        """
        if check_ejected(self.state, calling_learner()) is not None:
            await self.log.tail()  # it may have been readmitted
        if (rejection := check_ejected(self.state, calling_learner())) is not None:
            raise from_rejection(rejection)

    def wake(self) -> None:
        """Takes note of a call: after a quiet time the log is read and leases are shared at once."""
        if self._pace.touch():
            self._tail_now.set()
            self._advise_now.set()

    async def run(self) -> None:
        """Serves until cancelled.

        Raises:
            LogCorruptError, NewerFormatError: the log can't be followed here any more, as all streams were told.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                tasks.create_task(self._tail(), name="tail")
                tasks.create_task(self._decide(), name="decide")
                tasks.create_task(self._advise(), name="advise")
                tasks.create_task(keep_small(self.stored, self._settings, self._done), name="upkeep")
        except* (LogCorruptError, NewerFormatError) as errors:
            self.followers.end(errors.exceptions[0])
            raise
        finally:
            self._tasks = None
            self._unsubscribe()
            self.roll_backs.end()
            self.followers.close(DrainingError())

    async def drain(self) -> None:
        """Sends followers to another replica, closes no further round, and returns when merges have ended."""
        self._is_draining = True
        self.followers.close(DrainingError())
        self._decide_now.set()
        while self._merges:
            await asyncio.wait(self._merges)

    async def attach(self, item: SessionItem) -> None:
        """Makes the session the learner's newest, if it is not, and renews its lease.

        Raises:
            SyncerError: the run takes no learners, or a newer session fences this one.
        """
        (outcome,) = await self.log.append([item])
        if outcome.rejection is not None and outcome.rejection.reason != "REPEATED":
            raise from_rejection(outcome.rejection)
        self.leases.renew(item.learner, item.session, self._clock.monotonic_s())
        self._decide_now.set()

    @contextmanager
    def attached(self, learner: str, session: str) -> Iterator[EventStream]:
        """Yields the stream of an attached learner's events, first of the rounds that are open.

        It lasts as long as the context.
        """
        with self.followers.following(learner, session) as stream:
            if (rejection := check_live(self.state, learner, session)) is not None:  # since its own entry was folded
                stream.end(from_rejection(rejection))
            self._end_if_closed()  # likewise
            for fragment, version in self._open_rounds:
                opened = RoundOpened(fragment=fragment, version=version)
                stream.put(self._now(round_opened=opened))
            self._send_learner(learner)
            yield stream

    def report(self, learner: str, session: str, report: LearnerReport) -> None:
        """Renews the learner's lease and passes its report on to observers."""
        self.leases.renew(learner, session, self._clock.monotonic_s(), report)
        self._send_learner(learner)
        self._decide_now.set()

    async def leave(self, learner: str, session: str) -> None:
        """Ends the learner's session for good."""
        await self.log.append([LeftItem(learner, session)])
        self.leases.end(learner, session)
        self._send_learner(learner)  # with its last report
        self._advise_now.set()
        self._decide_now.set()

    def push_begun(self, fragment: str, learner: str, session: str, step_count: int) -> None:
        """Renews the lease of a learner that begins a push; a delta of H steps or more announces its round at once."""
        self.leases.renew(learner, session, self._clock.monotonic_s())
        if step_count >= self.state.policy.inner_step_count:
            known = self.state.fragments[fragment]
            self._announce(fragment, known.version + (1 if known.closing is None else 2))

    def view(self) -> MembershipView:
        """Returns which learners are live now, and what they reported last."""
        return self.leases.view(self.state, self._clock.monotonic_s())

    def learner_status(self, known: LearnerState) -> LearnerStatus:
        """Returns a learner as this replica sees it now."""
        seen = self.leases.seen(self.state, known, self._clock.monotonic_s())
        return learner_message(known, seen, is_participating=known.learner in participants(self.state))

    async def closed(self) -> None:
        """Returns when the run is closed.

        Raises:
            DrainingError: the replica drains or fails first.
        """
        with self.followers.following() as stream:
            while self.state.status is not RunStatus.CLOSED:
                await stream.get()

    def _on_entry(self, entry: Entry, outcomes: tuple[Outcome, ...]) -> None:
        """Sends an entry's events to followers and wakes everything that waits for a change."""
        for event in events_of(self.state, entry, outcomes):
            self.followers.send(event)
        for outcome in outcomes:
            match outcome.item if outcome.rejection is None else None:
                case SessionItem() as item:
                    self._fence(item)
                case EjectionItem(learner=learner):
                    self._end_if_ejected(learner)
                case AcceptedItem(base_version=version, fragment=fragment) if version == INITIAL_BASE:
                    self._unseeded.append(fragment)
                case _:
                    pass
            for delta in outcome.decided:
                if delta.fate is not Fate.MERGED:  # its round may be void; the next one is announced again
                    self._announced.pop(delta.item.fragment, None)
        self._end_if_closed()
        self.wake()
        self._decide_now.set()
        self._tail_now.set()

    def _fence(self, new: SessionItem) -> None:
        """Ends the streams of the learner's older sessions."""
        error = SyncerError("SESSION_FENCED", f"a newer session of this learner attached. learner={new.learner}")
        self.followers.end(error, lambda stream: stream.learner == new.learner and stream.session != new.session)

    def _end_if_ejected(self, learner: str) -> None:
        if (rejection := check_ejected(self.state, learner)) is not None:
            self.followers.end(from_rejection(rejection), lambda stream: stream.caller == learner)
        self._send_learner(learner)

    def _end_if_closed(self) -> None:
        if self.state.status is RunStatus.CLOSED:  # after the events that tell learners the last fates
            error = SyncerError("RUN_CLOSED", "the run is closed; every delta has its fate")
            self.followers.end(error, lambda stream: stream.learner)

    def _now(self, **kind: Any) -> Event:
        """Returns an event that is not in the log."""
        return Event(position=self.state.position, time=timestamp(self._clock.unix_s()), **kind)

    def _send(self, **kind: Any) -> None:
        self.followers.send(self._now(**kind))

    def _send_learner(self, learner: str) -> None:
        if self.followers.have_observers:  # of many fragments the message takes long to make
            self._send(learner=self.learner_status(self.state.learners[learner]))

    def _announce(self, fragment: str, version: int) -> None:
        """Sends RoundOpened, once for each round."""
        if self._announced.get(fragment, 0) < version:
            self._announced[fragment] = version
            self._send(round_opened=RoundOpened(fragment=fragment, version=version))

    async def _done(self, work: Awaitable[object], failure: str, **facts: object) -> bool:
        """Returns true after `work`, and false after a failure of the store, which is logged.

        Raises:
            LogCorruptError, NewerFormatError: the log can't be followed here any more.
        """
        try:
            await work
        except (LogCorruptError, NewerFormatError):
            raise
        except StoreError as error:
            _LOG.warning(failure, run=self.log.spec.name, cause=str(error), **facts)
            return False
        return True

    async def _tail(self) -> None:
        """Folds others' entries: soon after an own append, and less and less often while nothing happens."""
        while True:
            self._tail_now.clear()
            is_read = await self._done(self.log.tail(), "log could not be read")
            await self._clock.sleep(self._settings.busy_poll_s)
            longest_s = self._settings.waiting_poll_s if self._is_busy() else self._settings.idle_poll_s
            await wait(self._tail_now, self._pace.pause_s(0.0, longest_s) if is_read else self._settings.retry_s)

    def _is_busy(self) -> bool:
        return bool(self._open_rounds) or any(fragment.closing for fragment in self.state.fragments.values())

    async def _decide(self) -> None:
        """Appends what the round engine decides and starts the merges that it names."""
        while True:
            self._decide_now.clear()
            now_s = self._clock.monotonic_s()
            view = self.leases.view(self.state, now_s)
            decisions = self.engine.decide(self.state, view, now_s, may_close=not self._is_draining)
            live = set(view.live)
            for learner in sorted(live ^ self._live):  # its lease ran out or came back
                self._send_learner(learner)
            self._live = live
            self._open_rounds = decisions.open_rounds
            for fragment, version in decisions.open_rounds:
                self._announce(fragment, version)
            for closing in decisions.merges:
                self._start(self._merge(closing))
            while self._unseeded and not self._is_draining:  # so that the draft's commit has less to do
                self._start(self._seed(self._unseeded.pop()))
            asked = self.state.asked_rollback
            if asked not in (None, self._asked_rollback) and not self._is_draining:
                self._asked_rollback = asked
                self._start(self._roll_back(asked))
            if decisions.items and await self._propose(decisions.items):
                continue
            wakes = (decisions.wake_at_s, self.leases.next_change_s(self.state, now_s))
            wake_at_s = min((at_s for at_s in wakes if at_s is not None), default=None)
            await wait(self._decide_now, None if wake_at_s is None else max(0.0, wake_at_s - now_s))

    async def _propose(self, items: tuple[Item, ...]) -> bool:
        """Appends decisions to the log; returns false if the log did not move, so that deciding again is pointless."""
        before = self.state.position

        async def append() -> None:
            """Of several replicas' closes of one round, the one that the log admits says who merges."""
            self.engine.appended(await self.log.append(items))

        if await self._done(append(), "decision could not be written"):
            return self.state.position != before
        await self._clock.sleep(self._settings.retry_s)
        return True

    async def _advise(self) -> None:
        """Shares leases with other replicas, three times a term, and less often while nothing happens."""
        while True:
            self._advise_now.clear()
            await self._done(self._share_leases(), "leases could not be shared")
            pause_s = self._pace.pause_s(self.state.policy.lease_term_s / 3, self._settings.idle_advice_s)
            await wait(self._advise_now, pause_s)

    async def _share_leases(self) -> None:
        if await self._advice.share(self.leases, self._clock.monotonic_s()):
            self._decide_now.set()

    def _start(self, work: Coroutine[Any, Any, object]) -> None:
        assert self._tasks is not None  # called inside `run` only
        task = self._tasks.create_task(work)
        self._merges[task] = None
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[Any]) -> None:
        del self._merges[task]
        self._decide_now.set()

    async def _seed(self, fragment: str) -> None:
        await self._done(self.merger.seed(fragment), "initial weights could not be stored", fragment=fragment)

    async def _roll_back(self, asked: AskedRollback) -> None:
        """Rolls the run back as the gate asks, unless another replica does so first."""
        facts = {"target_position": asked.target_position, "author": asked.author}
        _LOG.warning("rolling the run back", run=self.log.spec.name, **facts)
        while self.state.asked_rollback == asked and not self._is_draining:
            rolling = self.roll_backs.roll_back(asked.request_id, asked.target_position, asked.author)
            try:
                if not await self._done(rolling, "roll-back failed", **facts):
                    await self._clock.sleep(self._settings.retry_s)
            except SyncerError as error:  # the run was closed, or the weights were collected meanwhile
                _LOG.error("run can't be rolled back", run=self.log.spec.name, cause=str(error), **facts)
                return

    async def _merge(self, closing: ClosedItem) -> None:
        """Merges until the set is committed, by any replica, or closed again; while draining, stops at a failure."""
        pause_s, facts = self._settings.retry_s, {"fragment": closing.fragment, "version": closing.version}
        try:
            while not await self._done(self._merge_once(closing), "merge failed", **facts):
                if self._is_draining:
                    return
                await self._clock.sleep(pause_s)
                pause_s = min(2 * pause_s, self._settings.longest_retry_s)
        finally:
            self.engine.merge_ended(closing, self._clock.monotonic_s())

    async def _merge_once(self, closing: ClosedItem) -> None:
        try:
            await self.merger.merge(closing)
        except DAMAGE as error:
            if not self.merger.is_current(closing):  # it is committed, and what it was made of may be collected
                return
            if not isinstance(error, UnreadableDeltaError) or not await self._close_again(closing, error):
                hint = "restore it from a backup, or keep the weights and lose momentum by `skerry rollback`"
                facts = f"{error}. {hint}. position={self.state.position}"
                raise UnreadableObjectError(f"state of fragment {closing.fragment}", facts) from error
        else:
            if self.merger.wants_snapshot(closing.fragment):
                await self.merger.snapshot(closing.fragment)

    async def _close_again(self, closing: ClosedItem, error: UnreadableDeltaError) -> bool:
        """Freezes the set again without the unreadable delta, and returns whether that is one of the set.

        A set that becomes empty makes the round void.
        """
        item = closed_without(self.state, self.view(), closing, error.delta)
        if item is None:  # it made an older version
            return False
        _LOG.warning("closing a round without an unreadable delta", fragment=closing.fragment, cause=str(error))
        if not await self._propose((item,)):
            await self._clock.sleep(self._settings.retry_s)
        return True
