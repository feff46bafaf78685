"""What the parts of one learner's exchange share: settings, calls, counts, what was seen, and whether to go on."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from operator import index
from typing import Any, Final, TypeVar

from skerry.algorithm.rebase import UNTRAINED, Trained
from skerry.errors import RunNotFoundError, SkerryError, StopExchangingError, is_transient
from skerry.exchange.boundary import Boundary
from skerry.model.interface import Parameters
from skerry.model.movement import Movement
from skerry.net.retry import Retry, RetrySettings
from skerry.net.transport import LANE_COUNT, Transport
from skerry.runtime.identifiers import Entropy
from skerry.runtime.logs import get_logger
from skerry.runtime.workers import Workers
from skerry.wire.layout import FragmentLayout, check_name
from skerry.wire.policy import Policy

_log = get_logger(__name__)

R = TypeVar("R")

DEFAULT_PART_SIZE_BYTES: Final = 8 * 2**20
_MOST_COUNTED: Final = 2**53  # what every language counts exactly
# How many of the last merged deltas, of all fragments, staleness and waiting are averaged over.
_RECENT: Final = 32
_LONGEST_TIMEOUT_S: Final = 1e9


class Adoption(StrEnum):
    """What happens to local work when a new version is adopted."""

    REBASE = "rebase"
    """It stays in the weights, on top of the new version: nothing that was learned while waiting is lost."""
    REPLACE = "replace"
    """The weights become the new version; work since the last delta is dropped."""
    BLEND = "blend"
    """The weights become `blend_alpha` times themselves plus `1 - blend_alpha` times the new version."""


def check_policy(policy: object) -> None:
    """Checks what a caller gave as a policy.

    Raises:
        TypeError: it is something else, and not None.
    """
    if policy is not None and not isinstance(policy, Policy):
        raise TypeError("policy must be a skerry.Policy; of a dict make one by Policy.from_json(values)")


def check_timeout(timeout_s: float, name: str) -> None:
    """Checks a time that a caller gave to wait for.

    Raises:
        ValueError: it is no number of seconds that anybody waits for; the message says `name`.
    """
    if not 0 < timeout_s <= _LONGEST_TIMEOUT_S:
        raise ValueError(f"{name} must be above 0 and at most {_LONGEST_TIMEOUT_S:g}. {name}={timeout_s}")


def whole_number(value: Any, name: str) -> int:
    """Returns a count that a training loop gave: an integer, or what holds one, as `mask.sum()` does.

    A tensor on a device is waited for.

    Raises:
        ValueError: it is no whole number, or beyond 2^53.
    """
    number = value.item() if hasattr(value, "item") else value
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not (is_number and abs(number) <= _MOST_COUNTED and number == int(number)):
        raise ValueError(f"{name} must be a whole number of at most 2^53: a sum, not a mean. {name}={value!r}")
    return int(number)


@dataclass(frozen=True)
class ExchangeSettings:
    """How a learner takes part in a run.

    Raises:
        ValueError: a name is not legal, or a number is out of its range.
    """

    run: str
    learner_id: str
    region: str = ""
    may_create: bool = False
    policy: Policy | None = None  # policy of a run that this learner creates; an existing run keeps its own
    fragment_count: int | None = None  # of a run that this learner creates
    adoption: Adoption = Adoption.REBASE
    blend_alpha: float = 0.5
    allow_other_frozen: bool | Collection[str] = False
    connect_timeout_s: float = 30.0
    call_timeout_s: float = 20.0
    stall_timeout_s: float = 60.0  # a transfer may take any time as long as bytes move
    concurrent_transfers: int = 4
    lane_bytes: int = 4 * 2**20  # a transfer is spread over one parallel call for each so many bytes
    retry: RetrySettings = field(default_factory=RetrySettings)

    def __post_init__(self) -> None:
        """Checks names and ranges."""
        check_name(self.run, "run")
        check_name(self.learner_id, "learner")
        check_policy(self.policy)
        if self.region:
            check_name(self.region, "region")
        if not 0 <= self.blend_alpha <= 1:
            raise ValueError(f"blend_alpha must be 0 to 1. blend_alpha={self.blend_alpha}")
        check_timeout(self.connect_timeout_s, "connect_timeout_s")
        if self.fragment_count is not None and index(self.fragment_count) < 1:
            raise ValueError(f"fragment_count must be at least 1. fragment_count={self.fragment_count}")


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


@dataclass(frozen=True)
class Stats:
    """A learner's exchange at one moment. Counts only grow; they start at 0 with the process."""

    step_count: int = 0
    token_count: int = 0
    unsent_step_count: int = 0  # steps in no acknowledged delta, of the fragment with the most of them
    # Failure of the last call, until a delta is acknowledged; or why the last delta of a fragment was not merged, until
    # one of the fragment is.
    problem: SkerryError | None = None
    is_attached: bool = False
    bytes_up: int = 0  # bytes of deltas, as frames; repeated pushes count again
    bytes_down: int = 0  # bytes of updates and snapshots
    parameters_up_count: int = 0  # elements of acknowledged deltas: bytes_up * 8 over this is bits a parameter
    parameters_down_count: int = 0  # elements of adopted fragments
    deltas_acknowledged: int = 0
    deltas_merged: int = 0
    deltas_returned: int = 0  # refused or expired: their work went into a later delta
    deltas_dropped: int = 0  # poisoned or quarantined: their work is gone
    causes: Mapping[str, int] = field(default_factory=dict)  # of the last two counts: how many deltas had each cause
    dropped_step_count: int = 0  # steps whose work is gone, of the fragment with the most of them
    versions: Mapping[str, int] = field(default_factory=dict)  # the adopted version of each fragment
    staleness: float = 0.0  # mean over the last merged deltas
    waiting_s: float = 0.0  # mean time from copying the weights to hearing of the merge, over the same
    stall_s_last: float = 0.0  # time that Skerry took in the last step()
    stall_s_max: float = 0.0
    loss: float | None = None  # loss of the last step, as the training loop reported it
    step_time_s: float | None = None  # moving average of the time of a step


@dataclass(frozen=True)
class LastWork:
    """What became of a learner's last work: of each kind the steps, of the fragment with the most of them.

    It is true where the run has all of the work, or will merge it; and where the run's weights were asked for, if the
    model has them.
    """

    merged_step_count: int = 0  # of the last delta, in a version
    pending_step_count: int = 0  # acknowledged; the run has not decided yet
    dropped_step_count: int = 0  # quarantined, or not finite: gone
    unsent_step_count: int = 0  # not acknowledged, or expired
    because: str = ""  # why there are steps of the last two
    is_loaded: bool | None = None  # whether the model has the run's weights; None: they were not asked for

    def __bool__(self) -> bool:
        """Whether nothing of the work is missing from the run."""
        return not (self.dropped_step_count or self.unsent_step_count or self.is_loaded is False)

    def __or__(self, other: LastWork) -> LastWork:
        """Returns what became of the work of both."""
        counts = {name: max(getattr(self, name), getattr(other, name)) for name in _STEP_COUNTS}
        return replace(self, **counts, because=self.because or other.because)


_STEP_COUNTS: Final = tuple(name for name in LastWork.__annotations__ if name.endswith("_step_count"))
_COUNTS: Final = tuple(
    name for name in Stats.__annotations__ if name.startswith(("bytes_", "parameters_", "deltas_", "stall_"))
)


class Tally:
    """The running counts. The event loop writes them, except the stalls, which the training thread writes."""

    bytes_up = bytes_down = parameters_up_count = parameters_down_count = 0
    deltas_acknowledged = deltas_merged = deltas_returned = deltas_dropped = 0
    stall_s_last = stall_s_max = stall_s_since_report = 0.0

    def __init__(self) -> None:
        self.causes: dict[str, int] = {}
        self._staleness: deque[int] = deque(maxlen=_RECENT)
        self._waiting_s: deque[float] = deque(maxlen=_RECENT)

    def sent(self, size_bytes: int) -> None:
        """Counts bytes of frames that went up."""
        self.bytes_up += size_bytes

    def received(self, size_bytes: int) -> None:
        """Counts bytes of updates and snapshots that came down."""
        self.bytes_down += size_bytes

    def merged(self, staleness: int, waiting_s: float) -> None:
        """Counts a delta that was merged."""
        self.deltas_merged += 1
        self._staleness.append(staleness)
        self._waiting_s.append(waiting_s)

    def stalled(self, stall_s: float) -> None:
        """Counts the time that one step() took."""
        self.stall_s_last = stall_s
        self.stall_s_max = max(self.stall_s_max, stall_s)
        self.stall_s_since_report = max(self.stall_s_since_report, stall_s)

    def stats(self, **others: Any) -> Stats:
        """Returns the counts now, with the fields that are not counted here."""
        return Stats(
            **others,
            staleness=_mean(tuple(self._staleness)),
            waiting_s=_mean(tuple(self._waiting_s)),
            causes=dict(self.causes),
            **{name: getattr(self, name) for name in _COUNTS},
        )


def _mean(values: tuple[float, ...]) -> float:
    return sum(values) / len(values) if values else 0.0


class Reader:
    """What it takes to download from a run: calls, workers, and what was seen and counted. For one event loop."""

    def __init__(self, calls: Calls, workers: Workers, run: str, *, concurrent_transfers: int = 1) -> None:
        self.calls = calls
        self.workers = workers
        self.run = run
        self.run_uid = ""
        self.position = 0
        self.tally = Tally()
        self.transfers = asyncio.Semaphore(concurrent_transfers)

    def saw(self, position: int) -> None:
        """Takes note of a log position that an answer or event carried."""
        self.position = max(self.position, position)


class Session(Reader):
    """The shared state. It belongs to the event loop, except `trained`, which the training thread replaces."""

    def __init__(
        self,
        *,
        settings: ExchangeSettings,
        transport: Transport,
        parameters: Parameters,
        workers: Workers,
        entropy: Entropy,
        jitter: random.Random,
        boundary: Boundary,
    ) -> None:
        calls = Calls(
            transport,
            Retry(settings.retry, jitter, is_transient, before_pause=self._note_failure),
            timeout_s=settings.call_timeout_s,
            stall_timeout_s=settings.stall_timeout_s,
            lane_bytes=settings.lane_bytes,
        )
        super().__init__(calls, workers, settings.run, concurrent_transfers=settings.concurrent_transfers)
        self.settings = settings
        self.parameters = parameters
        self.movement = Movement(parameters)
        self.entropy = entropy
        self.boundary = boundary
        self.session_id = entropy.hex_id()
        self.policy = Policy()
        self.part_size_bytes = DEFAULT_PART_SIZE_BYTES
        self.trained: Trained = UNTRAINED
        self.loss: float | None = None
        self.step_time_s: float | None = None
        self.changed: list[str] = []  # fragments, by the training thread
        self.is_flushing = False
        self.is_ending = False  # nothing is trained after this flush
        self.is_saving = False  # the learner's account
        self.saved_at: Trained | None = None  # of the last account: a delta of the same steps would outdate it
        self.is_closed = False
        self.failure: SkerryError | None = None
        self.problem: SkerryError | None = None  # the last failure since a delta was acknowledged
        self.unmerged: dict[str, SkerryError] = {}  # by fragment: why its last delta was not merged
        self._told_causes: dict[str, int] = {}
        self.last_deltas: dict[str, str] = {}  # by fragment: the learner's last accepted delta, of any session, or ""
        self.attached = asyncio.Event()
        self.stopped = asyncio.Event()
        self.moving = asyncio.Semaphore(parameters.moving_limit)  # held while vectors of a fragment are in memory

    async def until_connected(self, call: Callable[[], Awaitable[R]]) -> R:
        """Returns a call's result, repeated until the syncer answers or `connect_timeout_s` is over.

        Raises:
            SkerryError: the last failure.
        """
        retry = replace(self.calls.endless, before_pause=self._say_waiting)
        return await retry.call(call, timeout_s=self.settings.connect_timeout_s)

    def _say_waiting(self, attempt: int, error: BaseException) -> None:
        if attempt == 1:
            _log.warning("no syncer answers yet, trying again", run=self.settings.run, because=str(error))

    def _note_failure(self, _attempt: int, error: BaseException) -> None:
        """Takes note of a call that failed and will be repeated, and logs what was not so before."""
        assert isinstance(error, SkerryError)  # nothing else is transient
        if self.problem is None or self.problem.reason != error.reason:
            _log.warning(
                "a call failed and will be repeated, training goes on",
                run=self.settings.run,
                learner=self.settings.learner_id,
                reason=error.reason,
                because=str(error),
            )
        self.problem = error

    def note_problem(self, error: SkerryError) -> None:
        """Takes note of a failure that will be tried again, in words that say what to do."""
        if isinstance(error, RunNotFoundError):
            error = RunNotFoundError(
                error.reason,
                "the run has vanished. Check that the syncer's store is mounted and is the one that it had; the "
                f"learner attaches by itself when the run is back. {error}",
            )
        self.problem = error

    def acknowledged(self, layout: FragmentLayout, delta_id: str) -> None:
        """Takes note that a delta of a fragment was acknowledged."""
        self.problem = None
        self.last_deltas[layout.name] = delta_id
        self.tally.deltas_acknowledged += 1
        self.tally.parameters_up_count += layout.numel
        if self.is_flushing:
            self.boundary.wake()

    def merged(self, layout: FragmentLayout) -> None:
        """Takes note that a delta of a fragment was merged."""
        self.unmerged.pop(layout.name, None)

    def not_merged(self, layout: FragmentLayout, cause: str, error: SkerryError, *, is_lost: bool) -> None:
        """Counts a delta that is not merged, and warns of the first one of its cause; `remind` tells how many follow.

        `is_lost`: its work is out of the model, too; else it goes into a later delta.
        """
        self.unmerged[layout.name] = error
        count = self.tally.causes[cause] = self.tally.causes.get(cause, 0) + 1
        if count == 1 or error.reason == "NON_FINITE":
            self._told_causes[cause] = count
        if count > 1 or error.reason == "NON_FINITE":  # which the exchange says once for all fragments
            return
        what_follows = "lost, and the fragment is replaced by the run's newest version" if is_lost else "sent again"
        (_log.error if is_lost else _log.warning)(
            f"a delta is not merged, its work is {what_follows}. more of this cause are counted, not told one by one",
            learner=self.settings.learner_id,
            fragment=layout.name,
            cause=cause,
            because=str(error),
        )

    def remind_of_causes(self) -> None:
        """Warns of the deltas that were not merged since it did so last, with one line for each cause."""
        for cause, count in tuple(self.tally.causes.items()):
            if count > self._told_causes.get(cause, 0):
                self._told_causes[cause] = count
                _log.warning(
                    "deltas were not merged",
                    run=self.settings.run,
                    learner=self.settings.learner_id,
                    cause=cause,
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
        _log.error(
            "exchange stopped, training goes on alone",
            run=self.settings.run,
            learner=self.settings.learner_id,
            reason=error.reason,
            because=str(error),
        )

    def end(self) -> None:
        """Ends the exchange for good."""
        self.stopped.set()
        self.boundary.wake()

    def run_closed(self) -> None:
        """Takes note that the run accepts no more deltas."""
        if not self.is_closed:
            _log.info("the run is closed", run=self.settings.run, learner=self.settings.learner_id)
        self.is_closed = True
        self.boundary.wake()
