"""The attach stream: keeps the lease with reports, and delivers events to the fragments."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

from skerry.errors import (
    RefusedError,
    RunClosedError,
    RunNotFoundError,
    SkerryError,
    StopExchangingError,
    StoreLostError,
    error_of,
)
from skerry.exchange.fragment import FragmentExchange
from skerry.exchange.push import earlier_delta
from skerry.exchange.session import Session, policy_of
from skerry.exchange.states import Idle, behind
from skerry.runtime.logs import get_logger
from skerry.v1 import exchange_pb2, types_pb2

_log = get_logger(__name__)

# The wait for an answer to a leave is short, since the lease runs out by itself.
_LEAVE_TIMEOUT_S: Final = 2.0
# The shortest that a policy can state: a syncer that states less does not make a learner report all the time.
_SHORTEST_LEASE_S: Final = 0.1
# Time between two reports even if the lease allows more, so that observers see the learner's progress.
_LONGEST_REPORT_INTERVAL_S: Final = 2.0


class Attachment:
    """Keeps one learner attached to its run; attaches again, with the same session, whenever the stream breaks."""

    def __init__(self, session: Session, fragments: Mapping[str, FragmentExchange]) -> None:
        """Call `run` to attach; `fragments`, by name, get the events."""
        self._session = session
        self._fragments = fragments
        self._lease_term_s = session.policy.lease_term_s
        self._leaving = asyncio.Event()
        self.report_due = asyncio.Event()  # set: the next report is sent at once
        self._detached = asyncio.Event()
        self._failure: SkerryError | None = None
        self._failed_for: set[str] = set()  # reasons since the last stream that was attached
        self._was_attached = False  # by the last stream
        self._run_step_count: float | None = None
        self._step_count_then = 0

    @property
    def progress(self) -> float | None:
        """The run's progress in inner steps: as last reported, plus own steps since; None before the first answer."""
        if self._run_step_count is None:
            return None
        return self._run_step_count + self._session.trained.step_count - self._step_count_then

    async def run(self) -> None:
        """Stays attached until `leave`, or until the run no longer takes this learner."""
        session = self._session
        try:
            await replace(
                session.calls.endless,
                is_worth_it=self._is_worth_it,
                has_progressed=lambda: self._was_attached,
                before_pause=self._note_failure,
            ).call(self._attach_until_left)
        except StopExchangingError as error:
            session.stop(error)
        except RunClosedError:
            self._on_closed()
        except SkerryError as error:
            if not self._leaving.is_set():  # refused before it was ever attached, which `wait` raises
                session.failure = error
                session.end()
                return
            _log.info("attach stream broke while leaving", learner=session.settings.learner_id, because=str(error))

    def _is_worth_it(self, error: BaseException) -> bool:
        is_final = isinstance(error, StopExchangingError | RunClosedError)
        if isinstance(error, RefusedError | RunNotFoundError) and self._run_step_count is None:
            return False  # nobody trains yet, and whoever starts the learner can change what is wrong
        return isinstance(error, SkerryError) and not is_final and not self._leaving.is_set()

    def _note_failure(self, attempt: int, error: BaseException) -> None:
        assert isinstance(error, SkerryError)
        is_new = error.reason not in self._failed_for
        self._failed_for.add(error.reason)
        self._failure = error
        self._session.note_problem(error)
        facts = {**self._session.facts, "reason": error.reason, "because": str(self._session.problem)}
        if isinstance(error, StoreLostError):
            _log.error("the store lost what was seen, training goes on alone", **facts)
        elif isinstance(error, RunNotFoundError):
            if is_new:  # and `ExchangeLoop` reminds of it
                _log.error("the run has vanished, training goes on alone until it is back", **facts)
        elif is_new or attempt.bit_count() == 1:  # the 1st, 2nd, 4th, 8th …
            _log.warning("attach stream broke, training goes on", **facts)

    async def wait(self) -> None:
        """Returns once the syncer has answered the first attach.

        Raises:
            SkerryError: it refused, or did not answer within `connect_timeout_s`.
        """
        session = self._session
        try:
            async with asyncio.timeout(session.settings.connect_timeout_s):
                await _first(session.attached.wait(), session.stopped.wait())
        except TimeoutError as error:
            raise self._failure or error_of("TIMEOUT", "attach was not answered") from error
        if session.stopped.is_set():
            raise session.failure or error_of("CANCELLED", "the exchange ended before it began")

    async def leave(self) -> None:
        """Tells the syncer that this learner leaves, so that no round waits for it."""
        session = self._session
        self._leaving.set()
        self.report_due.set()
        if session.attached.is_set() and not session.stopped.is_set():
            try:
                async with asyncio.timeout(_LEAVE_TIMEOUT_S):
                    await _first(session.stopped.wait(), self._detached.wait())
            except TimeoutError:
                _log.info("leave was not answered", learner=session.settings.learner_id)

    async def _attach_until_left(self) -> None:
        """Attaches, and returns when the stream ends after `leave`."""
        session = self._session
        if self._leaving.is_set():
            return
        try:
            await self._attach_once()
        finally:
            self._was_attached = session.attached.is_set()
            session.attached.clear()
            self._detached.set()
        if not self._leaving.is_set():
            raise error_of("UNREACHABLE", "attach stream ended")

    async def _attach_once(self) -> None:
        """Attaches and handles events until the stream ends."""
        session = self._session
        answered = asyncio.get_running_loop().create_future()
        responses = session.calls.transport.attach(self._reports(answered))
        try:
            async with aclosing(responses):
                async for response in responses:
                    if response.HasField("attached"):
                        self._on_attached(response.attached)
                        if not answered.done():
                            answered.set_result(None)
                    else:
                        self._on_event(response.event)
        finally:
            answered.cancel()  # gRPC leaves a task that waits for the next report after a refusal

    async def _reports(self, answered: asyncio.Future[None]) -> AsyncIterator[exchange_pb2.AttachRequest]:
        session = self._session
        yield exchange_pb2.AttachRequest(
            hello=exchange_pb2.Hello(
                run=session.settings.run,
                run_uid=session.run_uid,
                seen_position=session.position,
                learner_id=session.settings.learner_id,
                region=session.settings.region,
                session_id=session.session_id,
            )
        )
        await answered
        while not self._leaving.is_set():
            yield exchange_pb2.AttachRequest(report=self._report())
            with suppress(TimeoutError):
                async with asyncio.timeout(min(self._lease_term_s / 3, _LONGEST_REPORT_INTERVAL_S)):
                    await self.report_due.wait()
            self.report_due.clear()
        yield exchange_pb2.AttachRequest(report=self._report())  # so that observers see all of its steps
        yield exchange_pb2.AttachRequest(leave=exchange_pb2.Leave())

    def _report(self) -> types_pb2.LearnerReport:
        session = self._session
        report = types_pb2.LearnerReport(
            step_count=session.earlier.step_count + session.trained.step_count,
            token_count=session.earlier.token_count + session.trained.token_count,
            sent_bytes=session.tally.bytes_up,
            received_bytes=session.tally.bytes_down,
            is_flushing=session.is_ending,
            unsent_step_count=max(fragment.unsent_step_count for fragment in self._fragments.values()),
            problem=problem.reason if (problem := session.standing_problem) else "",
            dropped_step_count=max(fragment.dropped_step_count for fragment in self._fragments.values()),
            adopted=[
                types_pb2.FragmentVersion(fragment=name, version=fragment.ledger.version)
                for name, fragment in self._fragments.items()
            ],
        )
        if session.loss is not None:
            report.loss = session.loss
        if session.step_time_s is not None:
            report.step_time.FromTimedelta(timedelta(seconds=session.step_time_s))
        report.stall_time.FromTimedelta(timedelta(seconds=session.tally.stall_s_since_report))
        session.tally.stall_s_since_report = 0.0
        return report

    def _on_attached(self, attached: exchange_pb2.Attached) -> None:
        session, is_first = self._session, self._run_step_count is None
        session.saw(attached.run.position)
        session.policy = policy_of(attached.run.policy, session.policy)
        lease_term_s = attached.lease_term.seconds + attached.lease_term.nanos / 1e9
        self._lease_term_s = max(lease_term_s or session.policy.lease_term_s, _SHORTEST_LEASE_S)
        self._on_progress(attached.run_step_count)
        self._on_versions(attached.run.versions)
        self._on_status(attached.run.status)
        self._on_fates(attached.pending)
        if is_first:
            for fate in attached.pending:  # deltas of an earlier session
                self._wait_behind(fate)
        self._failed_for.clear()
        self._detached.clear()
        session.attached.set()
        _log.info("attached", **session.facts, position=session.position)

    def _wait_behind(self, fate: types_pb2.DeltaFate) -> None:
        """Has a fragment send nothing until a delta is decided."""
        fragment = self._fragments.get(fate.fragment)
        if fragment is not None and isinstance(state := fragment.state, Idle):
            step = state.contributed_step
            delta = earlier_delta(self._session, fragment.layout, fate.delta_id, last_step=step)
            fragment.state = behind(state, delta, fate)
            fragment.wake()

    def _on_event(self, event: types_pb2.Event) -> None:
        self._session.saw(event.position)
        match event.WhichOneof("kind"):
            case "round_opened":
                fragment = self._fragments.get(event.round_opened.fragment)
                if fragment is not None and self._run_step_count is not None:
                    fragment.on_round_opened(event.round_opened.version, self._run_step_count)
            case "delta_accepted":
                self._on_fates([event.delta_accepted])
            case "version_committed":
                committed = event.version_committed
                self._on_fates(committed.merged)
                self._on_versions([committed.version])
                self._on_progress(committed.run_step_count)
            case "fates_decided":
                self._on_fates(event.fates_decided.fates)
            case "policy_changed":
                self._session.policy = policy_of(event.policy_changed, self._session.policy)
            case "rolled_back":
                self._on_versions(event.rolled_back.versions)
                self._on_progress(event.rolled_back.run_step_count)
            case "status_changed":
                self._on_status(event.status_changed)
            case "draining":
                _log.info("syncer is draining, will attach elsewhere", learner=self._session.settings.learner_id)
            case _:
                pass  # events for observers, and kinds that later versions may add

    def _on_progress(self, run_step_count: float) -> None:
        self._run_step_count = run_step_count
        self._step_count_then = self._session.trained.step_count

    def _on_versions(self, versions: Iterable[types_pb2.FragmentVersion]) -> None:
        for version in versions:
            if (fragment := self._fragments.get(version.fragment)) is not None:
                fragment.on_version(version.version)

    def _on_fates(self, fates: Iterable[types_pb2.DeltaFate]) -> None:
        for fate in fates:
            if (fragment := self._fragments.get(fate.fragment)) is not None:
                fragment.on_fate(fate)

    def _on_status(self, status: types_pb2.RunStatus.ValueType) -> None:
        if status in (types_pb2.RUN_STATUS_CLOSING, types_pb2.RUN_STATUS_CLOSED):
            self._on_closed()

    def _on_closed(self) -> None:
        """Takes note that the run is closed; fragments ask for the fates of what is in flight, if no event tells."""
        self._session.run_closed()
        for fragment in self._fragments.values():
            fragment.wake()


async def _first(*waits: Coroutine[Any, Any, Any]) -> None:
    """Returns when the first of the waits is over."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
