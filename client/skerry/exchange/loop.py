"""A learner's exchange with a run: joins it, keeps the lease, drives every fragment. asyncio, no sockets, no threads.

The training thread calls `step`, and `serve` of the boundary. All else runs on the event loop, which in a product has a
thread of its own; a simulation runs it, and `step` with it, in virtual time over its own transport.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from skerry.algorithm.rebase import Ledger, Trained
from skerry.algorithm.schedule import first_contributions
from skerry.errors import RunClosedError, SkerryError, StopExchangingError
from skerry.exchange.adopt import load
from skerry.exchange.attachment import Attachment
from skerry.exchange.boundary import Boundary
from skerry.exchange.fragment import FragmentExchange, stats_of
from skerry.exchange.join import Joining, find_or_create
from skerry.exchange.pull import pull_newest
from skerry.exchange.session import REMINDER_S, Calls, Session, policy_of
from skerry.exchange.settings import ExchangeSettings, whole_number
from skerry.exchange.states import Idle
from skerry.exchange.untrained import check_untrained
from skerry.model.fragment_plan import check_same_tensors
from skerry.model.interface import Parameters
from skerry.runtime.identifiers import Entropy
from skerry.runtime.logs import announce, get_logger
from skerry.runtime.workers import Workers
from skerry.stats import LastWork, Stats
from skerry.v1 import capabilities_pb2, exchange_pb2, types_pb2
from skerry.wire import FragmentLayout, kernels
from skerry.wire.messages import layouts_from_messages
from skerry.wire.policy import Policy

_log = get_logger(__name__)

# Weight of a new step in the moving average of step times.
_STEP_TIME_FACTOR: Final = 0.1
# Loading kernels that another process has compiled takes less on a quiet machine.
_QUIET_S: Final = 2.0
# So many rounds of work are only unsent if something is wrong: one is being trained, and one may be on its way.
_MANY_ROUNDS: Final = 4


class ExchangeLoop:
    """One learner in one run; made, joined and run on one event loop."""

    def __init__(
        self,
        calls: Calls,
        parameters: Parameters,
        settings: ExchangeSettings,
        *,
        workers: Workers,
        entropy: Entropy,
        boundary: Boundary,
        others: Callable[[], Sequence[Stats]] = tuple,
        relay: Callable[[exchange_pb2.AttachResponse], None] = lambda _: None,
    ) -> None:
        """Call `join` before anything else. `others` returns the statistics of the session's other processes.

        `relay` gets what the first of them hears from the syncer, which the others are told by `hear`.
        """
        self._boundary = boundary
        self._session = Session(calls, parameters, settings, workers=workers, entropy=entropy, boundary=boundary)
        self._joining: Joining | None = None  # of the first process of the session
        self.layouts: tuple[FragmentLayout, ...] = ()  # of the run's fragments, once it is joined
        self._fragments: dict[str, FragmentExchange] = {}
        self._attachment = Attachment(self._session, self._fragments, others, relay)
        self._last_step_end_s: float | None = None
        self._is_step_posted = False
        self._acknowledged_count = 0  # at the last reminder
        self._next_reminder_s = boundary.clock.monotonic_s() + REMINDER_S

    # The training thread's side.

    def step(self, tokens: int, loss: float | None = None) -> tuple[str, ...]:
        """Counts a step of `tokens` and does the work that waits for a step boundary; never waits for the network.

        Returns the names of the fragments whose weights it changed.

        Raises:
            ValueError: `tokens` is below 1 or no whole number.
            TypeError: `loss` is no number.
            StopExchangingError: WEIGHTS_REPLACED.
        """
        tokens = whole_number(tokens, "tokens")
        if tokens < 1:
            raise ValueError(f"a step trains on at least one token. tokens={tokens}")
        begin_s = self._boundary.clock.monotonic_s()
        self.check_weights()
        session = self._session
        if self._last_step_end_s is not None:
            taken_s = begin_s - self._last_step_end_s
            average_s = taken_s if session.step_time_s is None else session.step_time_s
            session.step_time_s = average_s + _STEP_TIME_FACTOR * (taken_s - average_s)
        session.loss = None if loss is None else float(loss)
        session.trained = Trained(session.trained.step_count + 1, session.trained.token_count + tokens)
        self._boundary.work()
        # Only if something is due: waking the other thread costs this one its turn at the interpreter.
        may_send = not session.is_over and any(fragment.may_send for fragment in self._fragments.values())
        if may_send and not self._is_step_posted:
            self._is_step_posted = True
            self._boundary.post(self._on_step)
        if begin_s >= self._next_reminder_s:
            self._next_reminder_s = begin_s + REMINDER_S
            self._remind()
        self._last_step_end_s = self._boundary.clock.monotonic_s()
        session.tally.stalled(self._last_step_end_s - begin_s)
        return session.take_changed()

    def check_weights(self) -> None:
        """Ends the exchange if something other than training has replaced the weights: that is no work of the run.

        Raises:
            StopExchangingError: WEIGHTS_REPLACED.
        """
        session = self._session
        if session.failure is not None and session.failure.reason == "WEIGHTS_REPLACED":
            raise session.failure
        if problem := session.parameters.replaced():
            error = StopExchangingError("WEIGHTS_REPLACED", problem)
            self._boundary.post(lambda: session.stop(error))
            raise error

    def _remind(self) -> None:
        """Says that this learner trains alone, or that none of its work was taken since the last reminder."""
        session, acknowledged_count = self._session, self._session.tally.deltas_acknowledged
        unsent_count = max((fragment.unsent_step_count for fragment in self._fragments.values()), default=0)
        if session.failure is not None:
            session.say_stopped(session.failure)
        elif (
            acknowledged_count == self._acknowledged_count
            and unsent_count >= _MANY_ROUNDS * session.policy.inner_step_count
            and not session.is_closed
        ):
            _log.error(
                "the run takes none of this learner's work, training goes on",
                **session.facts,
                unsent_steps=unsent_count,
                reason=problem.reason if (problem := session.standing_problem) else "",
                because=str(problem or "its deltas wait for rounds that do not close"),
            )
        self._acknowledged_count = acknowledged_count

    @property
    def stats(self) -> Stats:
        """What the training loop may ask; cheap enough for every step."""
        return stats_of(self._session, self._fragments.values())

    def count_from(self, earlier: Trained) -> None:
        """Has counts go on after those of an earlier process; before the first step.

        Raises:
            ValueError: a step was counted already.
        """
        if step_count := self._session.trained.step_count:
            raise ValueError(f"a learner's state is loaded before its first step. steps={step_count}")
        self._session.earlier = earlier
        self._boundary.post(self._attachment.report_due.set)

    @property
    def is_flushed(self) -> bool:
        """Whether all work is acknowledged, or nothing can be sent any more and the last fates are known."""
        return self._session.is_over or all(fragment.is_flushed for fragment in self._fragments.values())

    @property
    def is_decided(self) -> bool:
        """Whether, moreover, the fates of all acknowledged work are known, and leave nothing to be sent again."""
        session, work = self._session, self.last_work
        has_news = session.is_over or session.is_closed or not (work.pending_step_count or work.unsent_step_count)
        return self.is_flushed and has_news

    @property
    def last_work(self) -> LastWork:
        """What became of the last steps, of all fragments together."""
        session, work = self._session, LastWork()
        for fragment in self._fragments.values():
            work |= fragment.last_work
        if work.unsent_step_count and not work.because:
            ended = "the run is closed" if session.is_closed else "it was not acknowledged"
            work = replace(work, because=str(session.failure or session.standing_problem or ended))
        return work

    @property
    def is_settled(self) -> bool:
        """Whether, moreover, all that was acknowledged is in the versions that were adopted, or is known to be lost."""
        is_idle = all(isinstance(fragment.state, Idle) for fragment in self._fragments.values())
        return self.is_flushed and (is_idle or self._session.is_over)

    def load_merged(self) -> bool:
        """Loads the weights of the versions adopted last, and returns whether it did; for the training thread.

        An exchange that has ended leaves the model as it is, since its work may be in no version.
        """
        if self._session.is_over:
            return False
        parameters = self._session.parameters
        for fragment in self._fragments.values():
            parameters.load(fragment.layout, parameters.from_host(fragment.ledger.anchor))()
        return True

    def merged_weights(self) -> dict[str, NDArray[np.float32]]:
        """Returns copies of the weights of the versions adopted last, by tensor name."""
        fragments = list(self._fragments.values())
        pieces = [piece for fragment in fragments for piece in fragment.layout.pieces(fragment.ledger.anchor)]
        return {name: weights.copy() for name, weights in pieces}

    # Joining.

    async def join(self, *, number: int = 0, count: int = 1) -> None:
        """Finds the run, or creates it from the model's own weights if it may, and loads its newest weights.

        Of `count` processes of one session this is the one with that number, which exchanges its share of fragments.

        The training thread must wait meanwhile.

        Raises:
            RunNotFoundError: no such run, and it may not be created.
            RefusedError: SHAPE_MISMATCH, FROZEN_DIFFERS, or another refusal by the server.
            SkerryError: the syncer did not answer within `connect_timeout_s`.
        """
        session = self._session
        await self.connect()
        run, joining = await find_or_create(session)
        self._joining = None if number else joining
        self._attachment.is_first = not number
        if run.status not in (types_pb2.RUN_STATUS_OPEN, types_pb2.RUN_STATUS_DRAFT):
            raise RunClosedError("RUN_CLOSED", f"the run is closed. run={run.name}")
        session.run_uid = run.uid
        session.saw(run.position)
        session.policy = policy_of(run.policy, Policy())
        self.layouts, _ = layouts_from_messages(run.tensors, run.fragments)
        check_same_tensors(session.parameters.tensors, self.layouts)
        await check_untrained(session, run)
        largest_numel = max(layout.numel for layout in self.layouts)
        await asyncio.gather(self._load_newest(number, count), self._warm_up(largest_numel))

    async def connect(self) -> None:
        """Waits until the syncer answers.

        Raises:
            SkerryError: it did not within `connect_timeout_s`.
        """
        session = self._session
        capabilities = await session.until_connected(
            lambda: session.calls.ask(
                lambda stubs: stubs.capabilities.GetCapabilities, capabilities_pb2.GetCapabilitiesRequest()
            )
        )
        if capabilities.suggested_part_size_bytes:
            session.part_size_bytes = capabilities.suggested_part_size_bytes

    async def _warm_up(self, numel: int) -> None:
        """Loads the kernels, and tells people why a start is quiet."""
        say = asyncio.get_running_loop().call_later(
            _QUIET_S,
            lambda: announce(_log, "loading kernels. the first start on a machine compiles them, for up to 30 s"),
        )
        try:
            await self._session.workers.run(kernels.warm_up, numel)
        finally:
            say.cancel()

    async def _load_newest(self, number: int, count: int) -> None:
        """Loads every fragment of a share; the training thread has not started, so no step boundary is waited for."""
        session = self._session
        starts = first_contributions(len(self.layouts), session.policy.inner_step_count)
        loaded = await asyncio.gather(*map(self._load, self.layouts[number::count], starts[number::count]))
        self._fragments.update((fragment.layout.name, fragment) for fragment in loaded)

    async def _load(self, layout: FragmentLayout, contributed_step: int) -> FragmentExchange:
        session = self._session
        async with session.moving:
            version = await pull_newest(session, layout)
            base = load(session.parameters, layout, session.parameters.from_host(version.weights))
            session.tally.parameters_down_count += layout.numel
        ledger = Ledger(version.version, version.digest, version.weights, base)
        return FragmentExchange(
            session, layout, ledger, contributed_step=contributed_step, restore_all=self.restore_all
        )

    # Running.

    async def run(self) -> None:
        """Exchanges until `leave`, or until this learner must stop; a defect stops it too. Call `join` first."""
        session = self._session
        try:
            async with asyncio.TaskGroup() as group:
                attach = group.create_task(_to_its_end(self._attachment.run()))
                fragments = [group.create_task(_to_its_end(fragment.run())) for fragment in self._fragments.values()]
                await session.stopped.wait()
                for task in (attach, *fragments):
                    task.cancel()
        except Exception as error:  # noqa: BLE001 - the training thread learns of it by `failure`, and goes on
            session.fail(error)
        finally:
            session.attached.clear()
            session.end()

    async def wait_attached(self) -> None:
        """Returns once the syncer has answered the first attach; `run` must be running.

        Raises:
            SkerryError: it refused, or did not answer within `connect_timeout_s`.
        """
        await self._attachment.wait()
        if self._joining is not None:
            announce(
                _log,
                "created the run" if self._joining.is_created else "joined the run",
                **self._session.facts,
                version=min(fragment.ledger.version for fragment in self._fragments.values()),
                others=self._joining.other_count,
            )

    async def leave(self) -> None:
        """Tells the syncer, so that no round waits for this learner, and ends `run`."""
        await self._attachment.leave()
        self._session.end()

    def hear(self, responses: Iterable[exchange_pb2.AttachResponse]) -> None:
        """Takes what the session's first process has heard from the syncer."""
        for response in responses:
            self._attachment.heard.put_nowait(response)

    def stop(self, error: SkerryError) -> None:
        """Ends the exchange because of an error, as if it were this process's own."""
        self._session.stop(error)

    def flush(self, *, is_last: bool = False) -> None:
        """Has every fragment send its unsent work at once, however few steps it holds.

        Rounds open for what is in flight if it has later steps behind it; with `is_last`, after which nothing is
        trained, for all of it.
        """
        self._session.is_flushing, self._session.is_ending = True, is_last
        self._attachment.report_due.set()
        for fragment in self._fragments.values():
            fragment.wake()

    def end_flush(self) -> None:
        """Goes back to a delta every H steps."""
        self._session.is_flushing = self._session.is_ending = False
        self._attachment.report_due.set()

    def _on_step(self) -> None:
        self._is_step_posted = False
        for fragment in self._fragments.values():
            fragment.wake()

    async def restore_all(self) -> None:
        """Loads the base into every fragment at one step boundary: weights of one that are not finite spoil the others.

        A gradient that is not finite has mostly spoiled all of them by then, so none is asked whether it is.
        """
        async with AsyncExitStack() as stack:
            fragments = list(self._fragments.values())
            for fragment in fragments:
                await stack.enter_async_context(fragment.lock)

            loaded = await self._boundary.run(lambda: [each.restore() for each in fragments], is_common=True)
            for fragment, weights in zip(fragments, loaded, strict=True):
                fragment.restored(weights)
            await self._session.workers.run(self._session.parameters.synchronize)  # workers read the bases next


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Does a task's work; a cancellation that nobody asked for is an error, which would end it silently otherwise."""
    try:
        await work
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RuntimeError("a task of the exchange ended as if it had been cancelled") from error
