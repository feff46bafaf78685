"""A learner of NumPy arrays: the training thread's whole interface, with the exchange in a background thread."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Self

import structlog
from numpy.typing import NDArray

from skerry.client.errors import SkerryError
from skerry.client.exchange import ExchangeLoop
from skerry.client.grpc_transport import GrpcTransport
from skerry.client.loop_thread import LoopThread
from skerry.client.parameters import ArrayParameters, Parameters
from skerry.client.session import Adoption, ExchangeSettings
from skerry.client.stats import Stats
from skerry.runtime.clock import SystemClock
from skerry.runtime.identifiers import SystemEntropy, system_random
from skerry.runtime.workers import ThreadWorkers
from skerry.wire.policy import Policy

_log = structlog.get_logger(__name__)

# Leaving without a word of `flush` still gives the last work a moment to go out.
_EXIT_FLUSH_TIMEOUT_S: Final = 10.0
# What is under way when the exchange ends has no way to take longer, but a process must not depend on that.
_END_TIMEOUT_S: Final = 5.0


class ArrayLearner:
    """An island that trains NumPy arrays, updated in place; needs no torch.

        with ArrayLearner(arrays, target="syncer.example:443", run="fit", learner_id="us-east") as island:
            for batch in data:
                train(arrays, batch)
                island.step(tokens=len(batch))

    Made, it is attached and `arrays` hold the run's newest weights. `step` and `flush` are for the one thread that
    changes the arrays. When the syncer can't be reached, training goes on and what was learned is sent later.

    Args:
        arrays: what is trained, by tensor name; or any `Parameters`.
        target: the syncer, host:port.
        run: name of the run.
        learner_id: name of this island, unique in the run; a newer process of the same id takes its place.
        region: for people.
        create: creates the run from `arrays` where there is none; who loses the race joins.
        policy: of a run that is created; an existing run keeps its own.
        planned_step_count: inner steps of one learner that a run that is created is meant to take, in place of the
            policy's own word. Over the last eighth of them outer momentum falls to 0, so that the weights come to rest:
            state it where you know it. The run may take fewer or more.
        adoption: what becomes of local work when a new version arrives.
        blend_alpha: share of the local weights where adoption is "blend".
        fragment_count: of a run that is created; by default by size.
        connect_timeout_s: bound of connecting and attaching.

    A learner that restarts begins with the run's newest weights; what its last process had not sent is lost.

    Raises:
        SkerryError: nobody answered in time, or the run does not take this learner; the message says why.
        ValueError: a name is not legal, the arrays can't be trained, or `planned_step_count` is not from 0 to 10^12.
    """

    def __init__(
        self,
        arrays: Mapping[str, NDArray[Any]] | Parameters,
        *,
        target: str,
        run: str,
        learner_id: str,
        region: str = "",
        create: bool = False,
        policy: Policy | None = None,
        planned_step_count: int | None = None,
        adoption: Adoption | str = Adoption.REBASE,
        blend_alpha: float = 0.5,
        fragment_count: int | None = None,
        connect_timeout_s: float = 30.0,
    ) -> None:
        settings = ExchangeSettings(
            run=run,
            learner_id=learner_id,
            region=region,
            may_create=create,
            policy=policy
            if planned_step_count is None
            else replace(policy or Policy(), planned_step_count=planned_step_count),
            fragment_count=fragment_count,
            adoption=Adoption(adoption),
            blend_alpha=blend_alpha,
            connect_timeout_s=connect_timeout_s,
        )
        parameters = ArrayParameters(arrays) if isinstance(arrays, Mapping) else arrays
        self._workers = ThreadWorkers(_worker_count())
        self._thread = LoopThread(f"skerry-{learner_id}")
        self._running: Future[None] | None = None
        self._transport = self._thread.run(_connect(target))
        try:
            self._exchange = self._thread.run(_joined(self._transport, parameters, settings, workers=self._workers))
            self._running = self._thread.start(self._exchange.run())
            self._running.add_done_callback(_say_failure)
            self._thread.run(self._exchange.wait_attached())
        except BaseException:
            self._stop_threads()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.flush(_EXIT_FLUSH_TIMEOUT_S)
        self.close()

    def step(self, tokens: int, loss: float | None = None) -> None:
        """Counts one finished inner step; may copy a fragment, or bring one to a newer version. Never waits.

        Raises:
            ValueError: `tokens` is below 1.
        """
        self._exchange.step(tokens, loss)

    def flush(self, timeout_s: float) -> bool:
        """Sends what is unsent, however little, and returns whether all of it was acknowledged in time.

        True also where there is nobody to send it to any more: the run is closed, or this learner was stopped.
        """
        self._thread.loop.call_soon_threadsafe(self._exchange.flush)
        try:
            return self._exchange.serve(lambda: self._exchange.is_flushed, timeout_s)
        finally:
            self._thread.loop.call_soon_threadsafe(self._exchange.end_flush)

    def close(self) -> None:
        """Says goodbye and ends the exchange; nothing is sent after it. Idempotent."""
        if self._thread.loop.is_closed():
            return
        try:
            self._thread.run(self._exchange.leave())
            if self._running is not None:
                wait([self._running], _END_TIMEOUT_S)
        finally:
            self._stop_threads()

    @property
    def stats(self) -> Stats:
        """What was exchanged so far; cheap enough for every step."""
        return self._exchange.stats

    @property
    def progress(self) -> float | None:
        """Inner steps of the run, as learning rates should follow it; None where nobody has said yet."""
        return self._exchange.progress

    @property
    def is_closed(self) -> bool:
        """Whether somebody has closed the run: what is learned from now on will not be merged."""
        return self._exchange.is_closed

    @property
    def failure(self) -> SkerryError | None:
        """Why this learner no longer exchanges, if it was stopped; training may go on."""
        return self._exchange.failure

    def _stop_threads(self) -> None:
        self._thread.run(self._transport.close())
        self._thread.close()
        self._workers.close()


async def _connect(target: str) -> GrpcTransport:
    return GrpcTransport(target)


async def _joined(
    transport: GrpcTransport, parameters: Parameters, settings: ExchangeSettings, *, workers: ThreadWorkers
) -> ExchangeLoop:
    exchange = ExchangeLoop(
        transport,
        parameters,
        settings,
        workers=workers,
        entropy=SystemEntropy(),
        jitter=system_random(),
        clock=SystemClock(),
    )
    await exchange.join()
    return exchange


def _say_failure(running: Future[None]) -> None:
    """A defect must not end in silence: training goes on, but alone."""
    if not running.cancelled() and (error := running.exception()) is not None:
        _log.error("exchange failed by a defect, training goes on alone", exc_info=error)


def _worker_count() -> int:
    """Returns how many threads encode and decode: never all processors, for training needs them."""
    return max(1, min(4, (os.cpu_count() or 1) // 2))
