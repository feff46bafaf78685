"""A learner's exchange with a run: joins it, holds the lease, drives every fragment. asyncio, no sockets, no threads.

The training thread calls `step` alone. In a product the loop runs in a background thread; a simulation runs it, and
`step` with it, on a loop of virtual time over a transport of its own.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import AsyncExitStack, aclosing
from datetime import timedelta
from typing import Any, Final, TypeVar

import numpy as np
import structlog
from numpy.typing import NDArray

from skerry.client.boundary import Boundary
from skerry.client.clock import Clock
from skerry.client.creation import CreationContext, NewRun, create_run
from skerry.client.errors import (
    RunClosedError,
    RunExistsError,
    RunNotFoundError,
    SkerryError,
    StopExchangingError,
    TryAgainError,
    error_of,
)
from skerry.client.fragment import FragmentExchange, pull_settings
from skerry.client.identifiers import Entropy
from skerry.client.ledger import Trained
from skerry.client.parameters import Parameters
from skerry.client.plan import check_same_tensors, plan_fragments
from skerry.client.pull import Pulled, pull
from skerry.client.schedule import first_contributions
from skerry.client.session import LONGEST_REPORT_INTERVAL_S, ExchangeSettings, Session
from skerry.client.stats import Stats
from skerry.client.transport import Transport
from skerry.client.workers import Workers
from skerry.v1 import capabilities_pb2, exchange_pb2, runs_pb2, types_pb2
from skerry.wire import FragmentLayout
from skerry.wire.messages import layouts_from_messages, layouts_to_messages, policy_from_message
from skerry.wire.policy import Policy

_log = structlog.get_logger(__name__)

R = TypeVar("R")

# Weight of a new step in the moving average of step times.
_STEP_TIME_FACTOR: Final = 0.1
# A goodbye is a courtesy: the lease runs out by itself.
_LEAVE_TIMEOUT_S: Final = 2.0


class ExchangeLoop:
    """One learner in one run; made, joined and run on one event loop."""

    def __init__(
        self,
        transport: Transport,
        parameters: Parameters,
        settings: ExchangeSettings,
        *,
        workers: Workers,
        entropy: Entropy,
        jitter: random.Random,
        clock: Clock,
        post: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        """Does nothing yet. `post` runs a callback on the loop from the training thread."""
        self._post = post or asyncio.get_running_loop().call_soon_threadsafe
        self._clock = clock
        self._boundary = Boundary(clock, self._post)
        self._session = Session(
            settings=settings,
            transport=transport,
            parameters=parameters,
            workers=workers,
            entropy=entropy,
            jitter=jitter,
            boundary=self._boundary,
        )
        self._layouts: tuple[FragmentLayout, ...] = ()
        self._fragments: dict[str, FragmentExchange] = {}
        self._lease_term_s = Policy().lease_term_s
        self._attach_failure: SkerryError | None = None
        self._leaving = asyncio.Event()
        self._detached = asyncio.Event()
        self._run_step_count: float | None = None
        self._step_count_when_attached = 0
        self._loss: float | None = None
        self._step_time_s: float | None = None
        self._last_step_end_s: float | None = None
        self._is_step_posted = False

    # The training thread's side.

    def step(self, tokens: int, loss: float | None = None) -> None:
        """Counts a step of `tokens` and does what waits for a step boundary; never waits for anybody.

        Raises:
            ValueError: `tokens` is below 1.
        """
        if tokens < 1:
            raise ValueError(f"a step trains on at least one token. tokens={tokens}")
        begin_s = self._clock.monotonic_s()
        session = self._session
        if self._last_step_end_s is not None:
            taken_s = begin_s - self._last_step_end_s
            average_s = taken_s if self._step_time_s is None else self._step_time_s
            self._step_time_s = average_s + _STEP_TIME_FACTOR * (taken_s - average_s)
        self._loss = loss
        session.trained = Trained(session.trained.step_count + 1, session.trained.token_count + tokens)
        if not session.stopped.is_set():
            self._boundary.work()
            if not self._is_step_posted:
                self._is_step_posted = True
                self._post(self._on_step)
        self._last_step_end_s = self._clock.monotonic_s()
        session.tally.stalled(self._last_step_end_s - begin_s)

    def serve(self, is_over: Callable[[], bool], timeout_s: float) -> bool:
        """Does the training thread's part without steps, until `is_over` or the timeout; returns the former."""
        return self._boundary.serve(is_over, timeout_s)

    @property
    def stats(self) -> Stats:
        """What was exchanged so far."""
        session = self._session
        return session.tally.stats(
            step_count=session.trained.step_count,
            token_count=session.trained.token_count,
            is_attached=session.attached.is_set(),
            versions={name: fragment.ledger.version for name, fragment in self._fragments.items()},
        )

    @property
    def progress(self) -> float | None:
        """Inner steps of the run, the mean over its learners, counted on by own steps; None before attaching."""
        if self._run_step_count is None:
            return None
        return self._run_step_count + self._session.trained.step_count - self._step_count_when_attached

    @property
    def is_closed(self) -> bool:
        """Whether the run takes no more deltas."""
        return self._session.is_closed

    @property
    def failure(self) -> SkerryError | None:
        """Why the exchange stopped for good, if it did."""
        return self._session.failure

    @property
    def is_flushed(self) -> bool:
        """Whether all work is acknowledged, or there is nobody to send it to any more."""
        session = self._session
        return (
            session.stopped.is_set()
            or session.is_closed
            or all(fragment.is_flushed for fragment in self._fragments.values())
        )

    # Joining.

    async def join(self) -> None:
        """Finds the run, or creates it from the model's own weights if it may, and loads its newest weights.

        To be called while the training thread waits.

        Raises:
            RunNotFoundError: no such run, and it may not be created.
            RefusedError: SHAPE_MISMATCH, and whatever else the server says no to.
            SkerryError: nobody answered within `connect_timeout_s`.
        """
        session = self._session
        capabilities = await self._until_connected(
            lambda: session.transport.get_capabilities(
                capabilities_pb2.GetCapabilitiesRequest(), timeout_s=session.settings.call_timeout_s
            )
        )
        if capabilities.suggested_part_size_bytes:
            session.part_size_bytes = capabilities.suggested_part_size_bytes
        run = await self._find_or_create()
        if run.status not in (types_pb2.RUN_STATUS_OPEN, types_pb2.RUN_STATUS_DRAFT):
            raise RunClosedError("RUN_CLOSED", f"the run is closed. run={run.name}")
        session.run_uid = run.uid
        session.saw(run.position)
        session.policy = policy_from_message(run.policy, Policy())
        self._layouts, _ = layouts_from_messages(run.tensors, run.fragments)
        check_same_tensors(session.parameters.tensors, self._layouts)
        await self._load_newest()

    async def _until_connected(self, call: Callable[[], Awaitable[R]]) -> R:
        """Repeats a call until somebody answers or the time to connect is over."""
        session = self._session
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + session.settings.connect_timeout_s
        failure_count = 0
        while True:
            try:
                return await call()
            except TryAgainError as error:
                failure_count += 1
                pause_s = session.pause_s(failure_count, error)
                if loop.time() + pause_s > deadline_s:
                    raise
                await asyncio.sleep(pause_s)

    async def _find_or_create(self) -> types_pb2.Run:
        session = self._session
        settings = session.settings
        request = runs_pb2.GetRunRequest(name=settings.run)

        def find() -> Awaitable[runs_pb2.GetRunResponse]:
            return session.transport.get_run(request, timeout_s=settings.call_timeout_s)

        try:
            return (await self._until_connected(find)).run
        except RunNotFoundError:
            if not settings.may_create:
                raise
        try:
            return await self._create()
        except RunExistsError as error:
            _log.info("another learner created the run, joining it", run=settings.run, uid=error.uid)
        return (await self._until_connected(find)).run

    async def _create(self) -> types_pb2.Run:
        session = self._session
        settings, parameters = session.settings, session.parameters
        plan = plan_fragments(parameters.tensors, fragment_count=settings.fragment_count)
        new = NewRun(
            name=settings.run,
            request_id=session.entropy.hex_id(),
            plan=plan,
            dtypes=parameters.dtypes,
            policy=settings.policy or Policy(),
        )

        def weights_of(layout: FragmentLayout) -> NDArray[np.float32]:
            buffer = parameters.buffer(layout)
            parameters.snapshot(layout, buffer)
            return parameters.to_host(buffer)

        context = CreationContext(
            session.transport,
            session.workers,
            session.jitter,
            retry=settings.retry,
            call_timeout_s=settings.call_timeout_s,
            stall_timeout_s=settings.stall_timeout_s,
            part_size_bytes=session.part_size_bytes,
        )
        run = await create_run(context, new, weights_of)
        _log.info("created the run", run=run.name, uid=run.uid, fragments=len(run.fragments))
        return run

    async def _load_newest(self) -> None:
        """Theta <- Theta, every fragment; the model is nobody's yet."""
        session = self._session
        starts = first_contributions(len(self._layouts), session.policy.inner_step_count)
        pulled = await asyncio.gather(*(self._pull_newest(layout) for layout in self._layouts))
        for layout, version, start in zip(self._layouts, pulled, starts, strict=True):
            fragment = FragmentExchange(
                session, layout, version, contributed_step=start, restore_all=self._restore_poisoned
            )
            session.parameters.load(layout, fragment.ledger.base)
            if not session.parameters.is_float32(layout):
                buffer = session.parameters.buffer(layout)
                session.parameters.snapshot(layout, buffer)
                fragment.loaded(buffer)
            session.tally.parameters_down_count += layout.numel
            self._fragments[layout.name] = fragment

    async def _pull_newest(self, layout: FragmentLayout) -> Pulled:
        session = self._session
        request = exchange_pb2.PullFragmentRequest(
            run=session.settings.run,
            run_uid=session.run_uid,
            seen_position=session.position,
            fragment=layout.name,
            from_version=-1,
            is_newest=True,
        )
        async with session.transfers:
            return await pull(
                session.transport,
                session.workers,
                request,
                layout,
                None,
                settings=pull_settings(session),
                count_bytes=session.tally.received,
            )

    # Running.

    async def run(self) -> None:
        """Exchanges until `leave`, or until this learner must stop; returns then. After `join`."""
        session = self._session
        try:
            async with asyncio.TaskGroup() as group:
                attach = group.create_task(self._attach_forever())
                fragments = [group.create_task(fragment.run()) for fragment in self._fragments.values()]
                await session.stopped.wait()
                for task in (attach, *fragments):
                    task.cancel()
        finally:
            session.attached.clear()
            session.end()

    async def wait_attached(self) -> None:
        """Returns once the syncer has answered the first attach.

        Raises:
            SkerryError: it said no, or did not answer within `connect_timeout_s`.
        """
        session = self._session
        try:
            async with asyncio.timeout(session.settings.connect_timeout_s):
                while not session.attached.is_set():
                    await _first(session.attached.wait(), session.stopped.wait())
                    if session.stopped.is_set():
                        raise session.failure or error_of("CANCELLED", "the exchange ended before it began")
        except TimeoutError as error:
            raise self._attach_failure or error_of("TIMEOUT", "attach was not answered") from error

    async def leave(self) -> None:
        """Says goodbye, so that no round waits for this learner, and ends `run`."""
        session = self._session
        self._leaving.set()
        if session.attached.is_set() and not session.stopped.is_set():
            try:
                async with asyncio.timeout(_LEAVE_TIMEOUT_S):
                    while session.attached.is_set():
                        await _first(session.stopped.wait(), self._detached.wait())
            except TimeoutError:
                _log.info("goodbye was not answered", learner=session.settings.learner_id)
        session.end()

    def flush(self) -> None:
        """Asks every fragment to send what is unsent, whatever H says."""
        self._session.is_flushing = True
        for fragment in self._fragments.values():
            fragment.wake()

    def end_flush(self) -> None:
        """Goes back to the schedule."""
        self._session.is_flushing = False

    def _on_step(self) -> None:
        self._is_step_posted = False
        for fragment in self._fragments.values():
            fragment.on_step()

    async def _restore_poisoned(self) -> None:
        """Puts every fragment whose weights are not finite back to its base, all at one step boundary."""
        fragments = list(self._fragments.values())
        async with AsyncExitStack() as stack:
            for fragment in fragments:
                await stack.enter_async_context(fragment.lock)

            def restore() -> tuple[list[FragmentExchange], Trained]:
                return [one for one in fragments if one.restore_if_poisoned()], self._session.trained

            restored, trained = await self._boundary.run(restore)
            for fragment in restored:
                fragment.restored(trained)
        _log.error(
            "weights were not finite, put back to the run's",
            learner=self._session.settings.learner_id,
            fragments=[fragment.layout.name for fragment in restored],
        )

    # The attach stream.

    async def _attach_forever(self) -> None:
        """Holds the lease: attaches, and attaches again with the same session whenever the stream breaks."""
        session = self._session
        failure_count = 0
        while not self._leaving.is_set():
            error: SkerryError = error_of("UNREACHABLE", "attach stream ended")
            try:
                await self._attach_once()
            except (StopExchangingError, RunNotFoundError) as refusal:
                session.stop(refusal)
                return
            except RunClosedError:
                session.run_closed()
                session.attached.clear()
                self._detached.set()
                return
            except SkerryError as failure:
                error = failure
            was_attached = session.attached.is_set()
            session.attached.clear()
            self._detached.set()
            if self._leaving.is_set():
                return
            failure_count = 1 if was_attached else failure_count + 1
            self._attach_failure = error
            if failure_count == 1:
                _log.warning(
                    "attach stream broke, training goes on",
                    run=session.settings.run,
                    learner=session.settings.learner_id,
                    reason=error.reason,
                    because=str(error),
                )
            await asyncio.sleep(session.pause_s(failure_count, error))

    async def _attach_once(self) -> None:
        """Attaches and takes in events until the stream ends."""
        session = self._session
        has_answer = asyncio.Event()
        responses = session.transport.attach(self._reports(has_answer))
        async with aclosing(responses):
            async for response in responses:
                if response.HasField("attached"):
                    self._on_attached(response.attached)
                    has_answer.set()
                else:
                    self._on_event(response.event)

    async def _reports(self, has_answer: asyncio.Event) -> AsyncIterator[exchange_pb2.AttachRequest]:
        session = self._session
        tensors, _ = layouts_to_messages(self._layouts, session.parameters.dtypes)
        yield exchange_pb2.AttachRequest(
            hello=exchange_pb2.Hello(
                run=session.settings.run,
                run_uid=session.run_uid,
                seen_position=session.position,
                learner_id=session.settings.learner_id,
                region=session.settings.region,
                session_id=session.session_id,
                tensors=tensors,
            )
        )
        await has_answer.wait()
        while not self._leaving.is_set():
            yield exchange_pb2.AttachRequest(report=self._report())
            try:
                async with asyncio.timeout(min(self._lease_term_s / 3, LONGEST_REPORT_INTERVAL_S)):
                    await self._leaving.wait()
            except TimeoutError:
                continue
        yield exchange_pb2.AttachRequest(leave=exchange_pb2.Leave())

    def _report(self) -> types_pb2.LearnerReport:
        session = self._session
        report = types_pb2.LearnerReport(
            step_count=session.trained.step_count,
            token_count=session.trained.token_count,
            sent_bytes=session.tally.bytes_up,
            received_bytes=session.tally.bytes_down,
            adopted=[
                types_pb2.FragmentVersion(fragment=name, version=fragment.ledger.version)
                for name, fragment in self._fragments.items()
            ],
        )
        if self._loss is not None:
            report.loss = self._loss
        if self._step_time_s is not None:
            report.step_time.FromTimedelta(timedelta(seconds=self._step_time_s))
        report.stall_time.FromTimedelta(timedelta(seconds=session.tally.stall_s_since_report))
        session.tally.stall_s_since_report = 0.0
        return report

    def _on_attached(self, attached: exchange_pb2.Attached) -> None:
        session = self._session
        session.saw(attached.run.position)
        session.policy = policy_from_message(attached.run.policy, session.policy)
        self._lease_term_s = attached.lease_term.ToTimedelta().total_seconds() or session.policy.lease_term_s
        self._run_step_count = attached.run_step_count
        self._step_count_when_attached = session.trained.step_count
        self._on_versions(attached.run.versions)
        self._on_status(attached.run.status)
        for fate in attached.pending:
            self._on_fate(fate)
        self._detached.clear()
        session.attached.set()
        _log.info("attached", run=session.settings.run, learner=session.settings.learner_id, position=session.position)

    def _on_event(self, event: types_pb2.Event) -> None:
        self._session.saw(event.position)
        match event.WhichOneof("kind"):
            case "round_opened":
                if (fragment := self._fragments.get(event.round_opened.fragment)) is not None:
                    fragment.on_round_opened(event.round_opened.version)
            case "delta_accepted":
                self._on_fate(event.delta_accepted)
            case "version_committed":
                for fate in event.version_committed.merged:
                    self._on_fate(fate)
                self._on_versions([event.version_committed.version])
            case "fates_decided":
                for fate in event.fates_decided.fates:
                    self._on_fate(fate)
            case "policy_changed":
                self._session.policy = policy_from_message(event.policy_changed, self._session.policy)
            case "rolled_back":
                self._on_versions(event.rolled_back.versions)
            case "status_changed":
                self._on_status(event.status_changed)
            case "draining":
                _log.info("syncer is draining, will attach elsewhere", learner=self._session.settings.learner_id)
            case _:
                pass  # other learners' affairs, and what later versions may add

    def _on_versions(self, versions: Iterable[types_pb2.FragmentVersion]) -> None:
        for version in versions:
            if (fragment := self._fragments.get(version.fragment)) is not None:
                fragment.on_version(version.version)

    def _on_fate(self, fate: types_pb2.DeltaFate) -> None:
        if (fragment := self._fragments.get(fate.fragment)) is not None:
            fragment.on_fate(fate)

    def _on_status(self, status: types_pb2.RunStatus.ValueType) -> None:
        if status in (types_pb2.RUN_STATUS_CLOSING, types_pb2.RUN_STATUS_CLOSED):
            self._session.run_closed()


async def _first(*waits: Coroutine[Any, Any, Any]) -> None:
    """Returns when the first of the waits is over."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
