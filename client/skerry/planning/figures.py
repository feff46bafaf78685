"""What the speed benchmark measured of Skerry: `figures.json`, which `python -m benchmarks.speed --keep` writes."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise

import msgspec

from skerry.wire.codecs import Codec


@dataclass(frozen=True)
class Figures:
    """What one parameter or one version costs, with one codec both ways.

    Memory, `step()`, the log and requests are those of the default, int4.
    """

    bits: float  # of a parameter, each way
    learner_cpu_s: float  # of a parameter, for each synchronisation
    syncer_cpu_s: float  # of a parameter of a learner, for each synchronisation
    learner_memory: float  # beyond training, as a multiple of the float32 size of what is trained
    step_s: float  # in `step()`, for each parameter of which it starts and ends an exchange
    put_count: float  # requests that write to the store, for a version of a fragment by one learner
    get_count: float  # requests that read from the store, likewise
    log_bytes: float  # likewise
    syncer_bytes: tuple[tuple[float, float], ...]  # fragment's float32 size, and memory with two learners
    syncer_learner_bytes: float  # more for each further learner

    def syncer_memory_bytes(self, fragment_bytes: float, learner_count: int) -> float:
        """Returns a syncer's memory with one merge at work, on the straight line through the two nearest sizes."""
        (x0, y0), (x1, y1) = next(
            (pair for pair in pairwise(self.syncer_bytes) if fragment_bytes <= pair[1][0]), self.syncer_bytes[-2:]
        )
        memory_bytes = y0 + (fragment_bytes - x0) * (y1 - y0) / (x1 - x0)
        return memory_bytes + max(0, learner_count - 2) * self.syncer_learner_bytes


def measured(codec: Codec) -> Figures:
    """Returns the figures of a codec."""
    content = files(__package__).joinpath("figures.json").read_bytes()
    return msgspec.json.decode(content, type=dict[Codec, Figures])[codec]
