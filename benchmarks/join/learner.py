"""A learner that joins a run and adds random numbers to its weights; it tells when it did what.

Times are seconds since the parent started the process: all processes of a machine have one monotonic clock.
"""

from __future__ import annotations

import time

_BEGAN_S = time.monotonic()  # before the imports, which are timed

# ruff: noqa: E402

import argparse
import sys
import threading
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any, Final, TypeVar
from unittest.mock import patch

from benchmarks.dialogue import Dialogue

R = TypeVar("R")

H: Final = 24
RUN: Final = "join"
_CONNECT_S: Final = 120.0
_LONGEST_S: Final = 900.0
_NOISE_NUMEL: Final = 2**20


class Times:
    """When things happened first or last, and how many seconds all threads spent in a function."""

    def __init__(self, started_s: float) -> None:
        self._started_s = started_s
        self._lock = threading.Lock()
        self.at_s: dict[str, float] = {}
        self.cpu_s: dict[str, float] = {}  # of all threads until then
        self.spent_s: defaultdict[str, float] = defaultdict(float)
        self.size_bytes = 0

    def mark(self, name: str, at_s: float | None = None) -> None:
        """Takes note that it happens now, or did then."""
        self.at_s[name] = (time.monotonic() if at_s is None else at_s) - self._started_s
        self.cpu_s[name] = time.process_time()

    def answer(self) -> dict[str, Any]:
        """Returns what was noted."""
        return {
            "at_s": self.at_s,
            "cpu_s": self.cpu_s,
            "spent_s": self.spent_s,
            "size_bytes": self.size_bytes,
        }

    def spending(self, name: str, function: Callable[..., R]) -> Callable[..., R]:
        """Returns the function, whose time is added up."""

        def timed(*arguments: Any, **options: Any) -> R:
            begin_s = time.thread_time()
            try:
                return function(*arguments, **options)
            finally:
                with self._lock:
                    self.spent_s[name] += time.thread_time() - begin_s

        return timed

    def watch(self) -> None:
        """Has what the learner does while it joins be timed."""
        from skerry.exchange import join, loop
        from skerry.exchange.adopt import PlanApplier
        from skerry.net.grpc_transport import GrpcTransport
        from skerry.wire import kernels

        opened = GrpcTransport.pull_fragment

        async def find_or_create(session: Any) -> Any:
            self.mark("connected")
            found = await join.find_or_create(session)
            self.mark("run found")
            return found

        async def pull_fragment(transport: GrpcTransport, request: Any) -> AsyncGenerator[Any, None]:
            responses = opened(transport, request)
            try:
                async for response in responses:
                    if response.HasField("data"):
                        self.size_bytes += response.ByteSize()
                        if "first byte" not in self.at_s:
                            self.mark("first byte")
                        if "attached" not in self.at_s:
                            self.mark("last byte")
                    yield response
            finally:
                await responses.aclose()

        for target, name, replacement in (
            (loop, "find_or_create", find_or_create),
            (GrpcTransport, "pull_fragment", pull_fragment),
            (PlanApplier, "feed", self.spending("apply", PlanApplier.feed)),
            (PlanApplier, "finish", self.spending("digest", PlanApplier.finish)),
            (kernels, "warm_up", self.spending("kernels", kernels.warm_up)),
        ):
            patch.object(target, name, replacement).start()


def arguments() -> argparse.Namespace:
    """Returns what the parent says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--started-s", type=float, required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--numel", type=int, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    parser.add_argument("--folder", type=Path, help="of mapped files that hold the weights, in place of torch tensors")
    parser.add_argument("--create", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Joins, then steps until it is killed."""
    given = arguments()
    dialogue, times = Dialogue(), Times(given.started_s)
    times.mark("interpreter", _BEGAN_S)
    if given.folder is None:
        import torch

        times.mark("import torch")
    import numpy as np

    from benchmarks.speed.models import shapes_of
    from skerry import ArrayLearner, Learner, Policy

    times.watch()
    times.mark("import skerry")
    arrays: dict[str, Any] = {
        name: np.memmap(given.folder / name, np.float32, "w+", shape=shape)
        if given.folder
        else np.zeros(shape, np.float32)
        for name, shape in shapes_of(given.numel).items()
    }
    noise = (0.02 * np.random.default_rng(0).standard_normal(_NOISE_NUMEL)).astype(np.float32)
    if given.create:
        for array in arrays.values():
            flat = array.reshape(-1)
            for first in range(0, flat.size, _NOISE_NUMEL):
                flat[first : first + _NOISE_NUMEL] = noise[: flat.size - first]
    weights = arrays
    if given.folder is None:
        weights = {name: torch.from_numpy(array) for name, array in arrays.items()}
        torch.optim.AdamW(weights.values())  # the first optimizer of a process imports more of torch
    times.mark("model made")
    learner = (ArrayLearner if given.folder else Learner)(
        weights,
        target=given.target,
        run=RUN,
        learner_id="island",
        create=given.create,
        policy=Policy(inner_step_count=H),
        connect_timeout_s=_CONNECT_S,
        tls="insecure",
    )
    times.mark("attached")
    next_s = time.monotonic()
    while time.monotonic() < given.started_s + _LONGEST_S:
        for array in arrays.values():
            flat = array.reshape(-1)[:_NOISE_NUMEL]
            flat += 1e-3 * noise[: flat.size]
        learner.step(1)
        stats = learner.stats
        reached = {"first step": True, "acknowledged": stats.deltas_acknowledged, "merged": stats.deltas_merged}
        for name, is_reached in reached.items():
            if is_reached and name not in times.at_s:
                times.mark(name)
                if name == "merged":
                    dialogue.answer(**times.answer())
        next_s += given.step_s
        time.sleep(max(0.0, next_s - time.monotonic()))
    sys.exit("nobody has ended this process")


if __name__ == "__main__":
    main()
