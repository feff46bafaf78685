"""What the parts of one learner's exchange share: calls, counts, what was seen, and whether to go on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from skerry.algorithm.rebase import UNTRAINED, Trained
from skerry.errors import RefusedError, RunNotFoundError, SkerryError, StopExchangingError, StoreLostError
from skerry.exchange.boundary import Boundary
from skerry.exchange.settings import ExchangeSettings
from skerry.model.interface import Parameters
from skerry.net.retry import Retry
from skerry.net.transport import LANE_COUNT, Method, Transport
from skerry.runtime.identifiers import Entropy
from skerry.runtime.logs import get_logger
from skerry.runtime.workers import Workers
from skerry.stats import Tally, share_of_plan
from skerry.v1 import types_pb2
from skerry.wire.layout import FragmentLayout
from skerry.wire.messages import policy_from_message
from skerry.wire.policy import Policy

_log = get_logger(__name__)

R = TypeVar("R")

# Between two log lines that say the same.
REMINDER_S: Final = 60.0
DEFAULT_PART_SIZE_BYTES: Final = 8 * 2**20
_CONCURRENT_TRANSFERS: Final = 4


@dataclass(frozen=True)
class Calls:
    """A transport and the rules of calling over it."""

    transport: Transport
    retry: Retry  # for idempotent calls
    timeout_s: float = 20.0  # deadline of a unary call
    stall_timeout_s: float = 60.0  # of a transfer, which may take any time as long as bytes move
    lane_bytes: int = 4 * 2**20  # a transfer is spread over one parallel call for each so many bytes
    lane_count: int = LANE_COUNT  # at most so many

    @property
    def endless(self) -> Retry:
        """The rule of `retry` without a bound on attempts."""
        return replace(self.retry, settings=replace(self.retry.settings, attempt_count=None))

    async def ask(self, method: Method[R], request: object, *, unknown: type[SkerryError] = RefusedError) -> R:
        """Returns the answer to one unary call."""
        return await self.transport.ask(method, request, timeout_s=self.timeout_s, unknown=unknown)


class Reader:
    """What it takes to download from a run: calls, workers, and what was seen and counted. For one event loop."""

    def __init__(self, calls: Calls, workers: Workers, run: str) -> None:
        self.calls = calls
        self.workers = workers
        self.run = run
        self.run_uid = ""
        self.position = 0
        self.tally = Tally()
        self.transfers = asyncio.Semaphore(_CONCURRENT_TRANSFERS)

    def saw(self, position: int) -> None:
        """Takes note of a log position that an answer or event carried."""
        self.position = max(self.position, position)


class Session(Reader):
    """The shared state. It belongs to the event loop, except `trained`, which the training thread replaces."""

    def __init__(
        self,
        calls: Calls,
        parameters: Parameters,
        settings: ExchangeSettings,
        *,
        workers: Workers,
        entropy: Entropy,
        boundary: Boundary,
    ) -> None:
        retry = replace(calls.retry, before_pause=lambda _, error: self.note_failure(error))
        super().__init__(replace(calls, retry=retry), workers, settings.run)
        self.settings = settings
        self.parameters = parameters
        self.entropy = entropy
        self.boundary = boundary
        self.session_id = settings.session_id or entropy.hex_id()
        self.policy = Policy()
        self.part_size_bytes = DEFAULT_PART_SIZE_BYTES
        self.earlier: Trained = UNTRAINED  # counts of earlier processes of the learner, which reports and deltas add
        self.trained: Trained = UNTRAINED
        self.run_step_count: float | None = None  # of the run, as last reported; None before the first answer
        self._run_token_count = 0.0
        self._token_count_then = 0
        self.loss: float | None = None
        self.step_time_s: float | None = None
        self.changed: list[str] = []  # fragments, by the training thread
        self.is_flushing = False
        self.is_ending = False  # nothing is trained after this flush
        self.is_closed = False
        self.failure: SkerryError | None = None
        self.problem: SkerryError | None = None  # the last failure since a delta was acknowledged
        self.unmerged: dict[str, SkerryError] = {}  # by fragment: why its last delta was not merged
        self._silent_until_s: dict[str, float] = {}  # by the reason or cause that was told
        self.attached = asyncio.Event()
        self.stopped = asyncio.Event()
        self.moving = asyncio.Semaphore(parameters.moving_limit)  # held while vectors of a fragment are in memory

    @property
    def facts(self) -> dict[str, str]:
        """Whose exchange it is, for a log event."""
        return {"run": self.settings.run, "learner": self.settings.learner_id}

    def run_progressed(self, run_step_count: float, run_token_count: float) -> None:
        """Takes note of the run's progress in inner steps, and in tokens, from where it begins or is set back to."""
        self.run_step_count, self._run_token_count = run_step_count, run_token_count
        self._token_count_then = self.trained.token_count

    def run_went_on(self, run_step_count: float, run_token_count: float) -> None:
        """Takes note of the run's progress. Own tokens that are not merged yet still count."""
        self.run_progressed(run_step_count, max(run_token_count, self._tokens()))

    @property
    def progress(self) -> float | None:
        """What `Stats.progress` says: the tokens that the run reported last, and own tokens since."""
        return None if self.run_step_count is None else share_of_plan(self._tokens(), self.policy.planned_token_count)

    def _tokens(self) -> float:
        return self._run_token_count + self.trained.token_count - self._token_count_then

    async def until_connected(self, call: Callable[[], Awaitable[R]]) -> R:
        """Returns a call's result, repeated until the syncer answers or `connect_timeout_s` is over.

        Raises:
            SkerryError: the last failure.
        """

        def say(attempt: int, error: BaseException) -> None:
            if attempt == 1:
                _log.warning("no syncer answers yet, trying again", run=self.run, because=str(error))

        retry = replace(self.calls.endless, before_pause=say)
        return await retry.call(call, timeout_s=self.settings.connect_timeout_s)

    def note_failure(self, error: BaseException) -> None:
        """Takes note of a failure that will be tried again, and warns of it."""
        assert isinstance(error, SkerryError)  # nothing else is tried again
        if isinstance(error, RunNotFoundError):
            error = RunNotFoundError(
                error.reason,
                "the run has vanished. Check that the syncer's store is mounted and is the one that it had; the "
                f"learner attaches by itself when the run is back. {error}",
            )
        self.problem = error
        if self._may_tell(error.reason):
            needs_a_person = isinstance(error, RefusedError | RunNotFoundError | StoreLostError)
            (_log.error if needs_a_person else _log.warning)(
                "the exchange failed and will be tried again, training goes on",
                **self.facts,
                reason=error.reason,
                because=str(error),
            )

    def _may_tell(self, what: str) -> bool:
        """Whether to log what may happen often: at once, and then at most once in a while."""
        now_s = self.boundary.clock.monotonic_s()
        if now_s < self._silent_until_s.get(what, now_s):
            return False
        self._silent_until_s[what] = now_s + REMINDER_S
        return True

    def acknowledged(self, layout: FragmentLayout) -> None:
        """Takes note that a delta of a fragment was acknowledged."""
        self.problem = None
        self.tally.deltas_acknowledged += 1
        self.tally.parameters_up_count += layout.numel

    def not_merged(self, layout: FragmentLayout, cause: str, error: SkerryError, *, is_lost: bool) -> None:
        """Counts a delta that is not merged, and warns of it; if not `is_lost`, its work goes into a later one."""
        self.unmerged[layout.name] = error
        count = self.tally.not_merged(cause, is_lost=is_lost)
        if not self._may_tell(cause):
            return
        what_follows = "lost, and the weights are set back to the run's" if is_lost else "sent again"
        (_log.error if is_lost else _log.warning)(
            f"a delta is not merged, its work is {what_follows}. more of this cause are counted, not told one by one",
            **self.facts,
            fragment=layout.name,
            cause=cause,
            because=str(error),
            deltas=count,
            acknowledged=self.tally.deltas_acknowledged,
        )

    @property
    def standing_problem(self) -> SkerryError | None:
        """What `Stats.problem` says. Any thread may ask."""
        return self.problem or next(iter(tuple(self.unmerged.values())), None)

    def take_changed(self) -> tuple[str, ...]:
        """Returns the fragments whose weights were changed since the last call, each once; for the training thread."""
        changed, self.changed = tuple(dict.fromkeys(self.changed)), []
        return changed

    @property
    def is_over(self) -> bool:
        """Whether the exchange has ended. Any thread may ask; true as soon as `failure` is set."""
        return self.failure is not None or self.stopped.is_set()

    def stop(self, error: SkerryError) -> None:
        """Ends the exchange for good because of `error`, and logs it once; training goes on."""
        if self.is_over:
            return
        self.failure = self.problem = error
        self.say_stopped(error)
        self.end()

    def fail(self, error: BaseException) -> None:
        """Ends the exchange for good because of a defect, and logs where it came from."""
        cause = error
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        _log.error("the exchange has a defect", learner=self.settings.learner_id, exc_info=error)
        self.stop(
            StopExchangingError(
                "DEFECT",
                "the exchange failed by a defect of Skerry, which the traceback in the log shows: please report it. "
                f"To go on, attach again. cause={cause!r}",
            )
        )

    def say_stopped(self, error: SkerryError) -> None:
        """Logs that this learner exchanges no more."""
        because = str(error)
        _log.error("exchange stopped, training goes on alone", **self.facts, reason=error.reason, because=because)

    def end(self) -> None:
        """Ends the exchange for good."""
        self.stopped.set()
        self.boundary.wake()

    def run_closed(self) -> None:
        """Takes note that the run accepts no more deltas."""
        if not self.is_closed:
            _log.info("the run is closed", **self.facts)
        self.is_closed = True
        self.boundary.wake()


def policy_of(message: types_pb2.Policy, base: Policy) -> Policy:
    """Returns `base` with what an answer's policy sets.

    Raises:
        RefusedError: BAD_ANSWER: this version does not know the policy.
    """
    try:
        return policy_from_message(message, base)
    except ValueError as error:
        raise RefusedError("BAD_ANSWER", f"the policy is not one that this version knows. {error}") from error
