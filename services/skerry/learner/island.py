"""The seam between the training loop and the exchange: an island that is attached to a run, or one that is alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from skerry.client import Learner


@dataclass(frozen=True)
class ExchangeReading:
    """What the exchange has moved so far in this process, for the metrics. Counts only grow."""

    is_attached: bool = False
    staleness: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    parameters_up: int = 0
    parameters_down: int = 0
    deltas_acknowledged: int = 0
    deltas_merged: int = 0
    versions: Mapping[str, int] = field(default_factory=dict)


class Island(Protocol):
    """What the training loop calls at every step boundary. None of it waits for the network, except `flush`."""

    def step(self, *, tokens: int, loss: float | None) -> None:
        """Tell of one finished inner step; may replace parameters of the model."""
        ...

    def read(self) -> ExchangeReading:
        """What was exchanged so far."""
        ...

    @property
    def run_progress(self) -> float | None:
        """Inner steps of the run at its own pace, or None where nobody has said yet."""
        ...

    @property
    def is_run_closed(self) -> bool:
        """Somebody has closed the run: nothing that is learned from now on will be merged."""
        ...

    def flush(self, timeout_s: float) -> None:
        """Send what is unsent and wait for its fate, at most `timeout_s`."""
        ...


class LoneIsland:
    """An island without a run: plain training, the baseline to compare with."""

    def step(self, *, tokens: int, loss: float | None) -> None:
        """Do nothing."""

    def read(self) -> ExchangeReading:
        """Nothing was exchanged."""
        return ExchangeReading()

    @property
    def run_progress(self) -> float | None:
        """There is no run."""
        return None

    @property
    def is_run_closed(self) -> bool:
        """There is no run to close."""
        return False

    def flush(self, timeout_s: float) -> None:
        """There is nothing to send."""


class AttachedIsland:
    """An island of a run, over the client's `Learner`, whose life is the caller's."""

    def __init__(self, learner: Learner) -> None:
        """Adapt `learner`, which must be entered already."""
        self._learner = learner

    def step(self, *, tokens: int, loss: float | None) -> None:
        """Hand the step to the client: counters, a snapshot when a delta is due, adoption when a version arrived."""
        self._learner.step(tokens=tokens, loss=loss)

    def read(self) -> ExchangeReading:
        """The client's own counts."""
        stats = self._learner.stats
        return ExchangeReading(
            is_attached=stats.is_attached,
            staleness=stats.staleness,
            bytes_up=stats.bytes_up,
            bytes_down=stats.bytes_down,
            parameters_up=stats.parameters_up_count,
            parameters_down=stats.parameters_down_count,
            deltas_acknowledged=stats.deltas_acknowledged,
            deltas_merged=stats.deltas_merged,
            versions=dict(stats.versions),
        )

    @property
    def run_progress(self) -> float | None:
        """As the syncer last said."""
        return self._learner.progress

    @property
    def is_run_closed(self) -> bool:
        """As the client knows it."""
        return self._learner.is_closed

    def flush(self, timeout_s: float) -> None:
        """Push what is unsent and wait for fates."""
        self._learner.flush(timeout_s)
