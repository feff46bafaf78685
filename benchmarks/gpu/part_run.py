"""How a part of the benchmark is run."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TypeVar

import torch

from benchmarks.report import Row, measured

T = TypeVar("T")


@dataclass(frozen=True)
class PartRun:
    """The device, the sizes and the time of one part."""

    device_name: str
    is_quick: bool  # small sizes and few samples; the figures mean little
    end_s: float  # of time.monotonic(), which all processes of a machine share
    data: str | None = None  # a text to learn from; None: the sources of the installed Python packages

    @property
    def device(self) -> torch.device:
        """Where the part trains."""
        return torch.device(self.device_name)

    @property
    def left_s(self) -> float:
        """Seconds until it has to end."""
        return self.end_s - time.monotonic()

    def pick(self, full: T, quick: T) -> T:
        """Returns `full`, or `quick` for a quick look."""
        return quick if self.is_quick else full

    def skipped(self, case: str, least_s: float) -> Row | None:
        """Returns the row of a case that is left out, if less time is left than it takes."""
        left_s = self.left_s
        return measured(case, "skipped: time left / needed", [left_s], "s", limit=least_s) if left_s < least_s else None

    def wait(self) -> None:
        """Returns when the device has done all that was queued."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
