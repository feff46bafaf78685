"""The attach stream: keeps the lease with reports, and delivers events to the fragments."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Final

from skerry.errors import (
    RefusedError,
    RunClosedError,
    RunNotFoundError,
    SkerryError,
    StopExchangingError,
    error_of,
)
from skerry.exchange.fragment import FragmentExchange, stats_of
from skerry.exchange.session import Session, policy_of
from skerry.runtime.logs import get_logger
from skerry.stats import Stats, sum_of
from skerry.v1 import exchange_pb2, types_pb2

_log = get_logger(__name__)

# The wait for an answer to a leave is short, since the lease runs out by itself.
_LEAVE_TIMEOUT_S: Final = 2.0
# Time between two reports even if the lease allows more, so that observers see the learner's progress.
_LONGEST_REPORT_INTERVAL_S: Final = 2.0


class Attachment:
    """Keeps one learner attached to its run; attaches again, with the same session, whenever the stream breaks."""

    def __init__(
        self,
        session: Session,
        fragments: Mapping[str, FragmentExchange],
        others: Callable[[], Sequence[Stats]] = tuple,
        relay: Callable[[exchange_pb2.AttachResponse], None] = lambda _: None,
    ) -> None:
        """Call `run` to attach; `fragments`, by name, get the events. Reports are of this process and `others`.

        Of several processes of one session the first one has the stream, and `relay` gets what it hears.
        """
        self._session = session
        self._others = others
        self._relay = relay
        self.is_first = True
        self.heard: asyncio.Queue[exchange_pb2.AttachResponse | None] = asyncio.Queue()  # by the first process
        self._fragments = fragments
        self._lease_term_s = 0.0  # until it is attached
        self._leaving = asyncio.Event()
        self.report_due = asyncio.Event()  # set: the next report is sent at once
        self._answered = asyncio.Event()  # the first attach was answered, or never will be
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Stays attached until `leave`, or until the run no longer takes this learner."""
        session = self._session
        try:
            await replace(session.calls.endless, is_worth_it=self._is_worth_it, has_progressed=self._detached).call(
                self._attach
            )
        except StopExchangingError as error:
            session.stop(error)
        except RunClosedError:
            self._on_closed()
        except SkerryError as error:
            if self._leaving.is_set():
                _log.info("attach stream broke while leaving", learner=session.settings.learner_id, because=str(error))
            else:  # refused before it was ever attached, which `wait` raises
                session.failure = error
                session.end()
        finally:
            session.attached.clear()
            self._answered.set()
            self._ended.set()

    def _is_worth_it(self, error: BaseException) -> bool:
        if isinstance(error, RefusedError | RunNotFoundError) and self._session.run_step_count is None:
            return False  # nobody trains yet, and whoever starts the learner can change what is wrong
        is_final = isinstance(error, StopExchangingError | RunClosedError)
        return isinstance(error, SkerryError) and not is_final and not self._leaving.is_set()

    def _detached(self) -> bool:
        """Takes note that the stream broke, and returns whether it was attached."""
        was_attached = self._session.attached.is_set()
        self._session.attached.clear()
        return was_attached

    async def wait(self) -> None:
        """Returns once the syncer has answered the first attach.

        Raises:
            SkerryError: it refused, or did not answer within `connect_timeout_s`.
        """
        session = self._session
        try:
            async with asyncio.timeout(session.settings.connect_timeout_s):
                await self._answered.wait()
        except TimeoutError as error:
            raise session.problem or error_of("TIMEOUT", "attach was not answered") from error
        if session.is_over:
            raise session.failure or error_of("CANCELLED", "the exchange ended before it began")

    async def leave(self) -> None:
        """Tells the syncer that this learner leaves, so that no round waits for it."""
        self._leaving.set()
        self.report_due.set()
        self.heard.put_nowait(None)
        if self._session.attached.is_set():
            try:
                async with asyncio.timeout(_LEAVE_TIMEOUT_S):
                    await self._ended.wait()
            except TimeoutError:
                _log.info("leave was not answered", learner=self._session.settings.learner_id)

    async def _attach(self) -> None:
        """Attaches and handles events; returns when the stream ends after `leave`."""
        if self._leaving.is_set():
            return
        answered = asyncio.get_running_loop().create_future()
        transport = self._session.calls.transport
        responses = transport.attach(self._reports(answered)) if self.is_first else self._heard_first()
        try:
            async with aclosing(responses):
                async for response in responses:
                    if self.is_first:
                        self._relay(response)
                    if response.HasField("attached"):
                        self._on_attached(response.attached)
                        if not answered.done():
                            answered.set_result(None)
                    else:
                        self._on_event(response.event)
        finally:
            answered.cancel()  # gRPC leaves a task that waits for the next report after a refusal
        if not self._leaving.is_set():
            raise error_of("UNREACHABLE", "attach stream ended")

    async def _heard_first(self) -> AsyncGenerator[exchange_pb2.AttachResponse, None]:
        """Yields what the first process of the session hears, until this one leaves."""
        while (response := await self.heard.get()) is not None:
            yield response

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
        stats = sum_of([stats_of(session, self._fragments.values()), *self._others()])
        report = types_pb2.LearnerReport(
            step_count=stats.step_count,
            token_count=stats.token_count,
            sent_bytes=stats.bytes_up,
            received_bytes=stats.bytes_down,
            is_flushing=session.is_flushing,
            is_ending=session.is_ending,
            unsent_step_count=stats.unsent_step_count,
            problem=stats.problem.reason if stats.problem else "",
            dropped_step_count=stats.dropped_step_count,
            adopted=[types_pb2.FragmentVersion(fragment=name, version=own) for name, own in stats.versions.items()],
            loss=stats.loss,
        )
        if stats.step_time_s is not None:
            report.step_time.FromTimedelta(timedelta(seconds=stats.step_time_s))
        report.stall_time.FromTimedelta(timedelta(seconds=session.tally.stall_s_since_report))
        session.tally.stall_s_since_report = 0.0
        return report

    def _on_attached(self, attached: exchange_pb2.Attached) -> None:
        session, is_first = self._session, self._session.run_step_count is None
        session.saw(attached.run.position)
        session.policy = policy_of(attached.run.policy, session.policy)
        self._lease_term_s = attached.lease_term.ToTimedelta().total_seconds() or session.policy.lease_term_s
        session.run_progressed(attached.run_step_count, attached.run_token_count)
        self._on_versions(attached.run.versions)
        self._on_status(attached.run.status)
        self._on_fates(attached.pending)
        if is_first:
            for fate in attached.pending:  # deltas of an earlier session
                if (fragment := self._fragments.get(fate.fragment)) is not None:
                    fragment.wait_behind(fate)
        session.attached.set()
        self._answered.set()
        _log.info("attached", **session.facts, position=session.position)

    def _on_event(self, event: types_pb2.Event) -> None:
        self._session.saw(event.position)
        match event.WhichOneof("kind"):
            case "round_opened":
                fragment = self._fragments.get(event.round_opened.fragment)
                if fragment is not None and self._session.run_step_count is not None:
                    fragment.on_round_opened(event.round_opened.version, self._session.run_step_count)
            case "delta_accepted":
                self._on_fates([event.delta_accepted])
            case "version_committed":
                committed = event.version_committed
                self._on_fates(committed.merged)
                self._on_versions([committed.version])
                self._session.run_went_on(committed.run_step_count, committed.run_token_count)
            case "fates_decided":
                self._on_fates(event.fates_decided.fates)
            case "policy_changed":
                self._session.policy = policy_of(event.policy_changed, self._session.policy)
            case "rolled_back":
                self._on_versions(event.rolled_back.versions)
                self._session.run_progressed(event.rolled_back.run_step_count, event.rolled_back.run_token_count)
            case "status_changed":
                self._on_status(event.status_changed)

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
