"""What the parts of one learner's exchange share: settings, connections, what was seen, and whether to go on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeVar

import structlog

from skerry.algorithm.rebase import UNTRAINED, Trained
from skerry.client.boundary import Boundary
from skerry.client.calls import Calls
from skerry.client.errors import SkerryError, is_transient
from skerry.client.parameters import Parameters
from skerry.client.stats import Tally
from skerry.client.transport import Transport
from skerry.runtime.identifiers import Entropy
from skerry.runtime.retry import Retry, RetrySettings
from skerry.runtime.workers import Workers
from skerry.wire.layout import check_name
from skerry.wire.policy import Policy

_log = structlog.get_logger(__name__)

R = TypeVar("R")


class Adoption(StrEnum):
    """What happens to local work when a new version is adopted."""

    REBASE = "rebase"
    """It stays in the weights, on top of the new version: nothing that was learned while waiting is lost."""
    REPLACE = "replace"
    """The weights become the new version; work since the last delta is dropped."""
    BLEND = "blend"
    """The weights become `blend_alpha` times themselves plus `1 - blend_alpha` times the new version."""


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
    policy: Policy | None = None  # of a run that this learner creates; an existing run keeps its own
    fragment_count: int | None = None  # likewise
    adoption: Adoption = Adoption.REBASE
    blend_alpha: float = 0.5
    connect_timeout_s: float = 30.0
    call_timeout_s: float = 20.0
    stall_timeout_s: float = 60.0  # a transfer may take any time as long as bytes move
    concurrent_transfers: int = 4
    retry: RetrySettings = field(default_factory=RetrySettings)

    def __post_init__(self) -> None:
        """Checks names and ranges."""
        check_name(self.run, "run")
        check_name(self.learner_id, "learner")
        if self.region:
            check_name(self.region, "region")
        if not 0 <= self.blend_alpha <= 1:
            raise ValueError(f"blend_alpha must be 0 to 1. blend_alpha={self.blend_alpha}")


DEFAULT_PART_SIZE_BYTES: Final = 8 * 2**20
# Time between two reports even if the lease allows more, so that observers see the learner's progress.
LONGEST_REPORT_INTERVAL_S: Final = 2.0


class Session:
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
        self.settings = settings
        self.calls = Calls(
            transport,
            Retry(settings.retry, jitter, is_transient),
            timeout_s=settings.call_timeout_s,
            stall_timeout_s=settings.stall_timeout_s,
        )
        self.parameters = parameters
        self.workers = workers
        self.entropy = entropy
        self.boundary = boundary
        self.session_id = entropy.hex_id()
        self.run_uid = ""
        self.position = 0
        self.policy = Policy()
        self.part_size_bytes = DEFAULT_PART_SIZE_BYTES
        self.tally = Tally()
        self.trained: Trained = UNTRAINED
        self.loss: float | None = None
        self.step_time_s: float | None = None
        self.is_flushing = False
        self.is_closed = False
        self.failure: SkerryError | None = None
        self.attached = asyncio.Event()
        self.stopped = asyncio.Event()
        self.transfers = asyncio.Semaphore(settings.concurrent_transfers)

    async def until_connected(self, call: Callable[[], Awaitable[R]]) -> R:
        """Returns a call's result, repeated until the syncer answers or `connect_timeout_s` is over.

        Raises:
            SkerryError: the last failure.
        """
        return await self.calls.endless.call(call, timeout_s=self.settings.connect_timeout_s)

    def saw(self, position: int) -> None:
        """Takes note of a log position that an answer or event carried."""
        self.position = max(self.position, position)

    @property
    def is_over(self) -> bool:
        """Whether the exchange has ended. Any thread may ask; true as soon as `failure` is set."""
        return self.failure is not None or self.stopped.is_set()

    def stop(self, error: SkerryError) -> None:
        """Ends the exchange for good because of `error`, and logs it once; training goes on."""
        if self.is_over:
            return
        self.failure = error
        _log.error(
            "exchange stopped, training goes on alone",
            run=self.settings.run,
            learner=self.settings.learner_id,
            reason=error.reason,
            because=str(error),
        )
        self.end()

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
