"""Training a GPT with and without Skerry, in turns, and what `step()` takes of the training thread and its stream.

One learner beside a real `skerry serve` on the same machine; with 24 fragments and H steps between two deltas, one
fragment moves about every H / 24 steps. Without Skerry means that `step()` is not called; the exchange is idle then.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.report import Row, measured
from benchmarks.speed.measuring import SEED, Size, paired
from benchmarks.speed.processes import Served, served
from skerry.client import Learner, Policy
from skerry.learner.model import MODEL_CONFIGS, Gpt, ModelConfig

_FRAGMENTS: Final = 24
_BLOCK_S: Final = 2.5  # a block of steps lasts at least so long, and each fragment moves in it


@dataclass(frozen=True)
class Case:
    """A model and how it is trained."""

    config: ModelConfig
    batch: int
    inner_step_count: int
    is_compiled: bool = False
    dtype: torch.dtype = torch.float32  # of the weights; all compute in bfloat16


def _cases(size: Size) -> Iterator[Case]:
    if size.is_quick:
        yield Case(replace(MODEL_CONFIGS["nano"], context=32), 2, 24)
        yield Case(replace(MODEL_CONFIGS["nano"], context=32), 2, 24, dtype=torch.bfloat16)
        return
    small = replace(MODEL_CONFIGS["base"], vocabulary=50304)
    large = MODEL_CONFIGS["large"]
    for is_compiled in (False, True):
        yield Case(small, 16, 48, is_compiled)
    yield Case(large, 4, 48)
    yield Case(large, 4, 48, is_compiled=True, dtype=torch.bfloat16)


def rows(size: Size, device: torch.device) -> Iterator[Row]:
    """Two sizes, compiled and not, weights in float32 and bfloat16."""
    for case in _cases(size):
        with tempfile.TemporaryDirectory(prefix="skerry-benchmark-") as name, served(Path(name)) as syncer:
            yield from _rows(case, size, device, syncer)
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _rows(case: Case, size: Size, device: torch.device, syncer: Served) -> Iterator[Row]:
    torch.manual_seed(SEED)
    model = Gpt(case.config).to(device=device, dtype=case.dtype)
    title = (
        f"{model.parameter_count / 1e6:.3g}M parameters in {str(case.dtype).removeprefix('torch.')}"
        f"{', compiled' if case.is_compiled else ''}, {case.batch} x {case.config.context} tokens"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    loss_of: Callable[..., torch.Tensor] = torch.compile(model.loss) if case.is_compiled else model.loss
    tokens = torch.randint(case.config.vocabulary, (case.batch, case.config.context + 1), device=device)

    def train() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = loss_of(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    joined_s = time.perf_counter()
    learner = Learner(
        model,
        target=syncer.target,
        run="steps",
        learner_id="gpu",
        create=True,
        policy=Policy(inner_step_count=case.inner_step_count, lease_term_s=120.0),
        fragment_count=_FRAGMENTS,
        connect_timeout_s=120.0,
    )
    joined_s = time.perf_counter() - joined_s
    count = case.batch * case.config.context
    for _ in range(3):
        train()
    step_s = _timed(train, 5, device)
    block = max(case.inner_step_count, 0 if size.is_quick else round(_BLOCK_S / step_s))
    watch = _Watch(device)

    def both() -> None:
        train()
        watch.step(lambda: learner.step(tokens=count))

    _timed(both, case.inner_step_count, device)  # the first deltas are due after H steps
    watch.forget()
    speeds: dict[bool, list[float]] = {True: [], False: []}
    for _, is_on in itertools.product(range(size.samples), (True, False)):
        seconds = _timed(both if is_on else train, block, device)
        speeds[is_on].append(1 / seconds)
        syncer.wait_idle()  # or what was sent in one block would burden the next
    stats = learner.stats
    learner.close()
    teraflops = [6 * model.parameter_count * count * speed / 1e12 for speed in speeds[False]]
    yield measured(title, "training without Skerry, by 6 N a token", teraflops, "TFLOP/s")
    yield paired(title, "training speed, with / without", speeds[True], "steps/s", limits=speeds[False])
    waits_ms, queued_ms = ([1e3 * call_s for call_s in calls_s] for calls_s in watch.seconds())
    limit_ms, mean_ms = 1e3 * step_s, sum(queued_ms) / len(queued_ms)
    yield measured(title, "time in step(), median / step", waits_ms, "ms", limit=limit_ms)
    yield measured(title, "time in step(), longest / step", [max(waits_ms)], "ms", limit=limit_ms)
    yield measured(title, "its work on the stream, mean / step", [mean_ms], "ms", limit=limit_ms)
    yield measured(title, "its work on the stream, longest / step", [max(queued_ms)], "ms", limit=limit_ms)
    yield measured(title, "deltas merged", [float(stats.deltas_merged)], "")
    yield measured(title, "creating the run and joining", [joined_s], "s")


class _Watch:
    """Times calls by the host's clock and by events on the stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._calls: list[tuple[float, Any, Any]] = []

    def step(self, call: Callable[[], object]) -> None:
        """Calls it."""
        before = self._event()
        start_s = time.perf_counter()
        call()
        seconds = time.perf_counter() - start_s
        self._calls.append((seconds, before, self._event()))

    def forget(self) -> None:
        """Starts anew."""
        self._calls.clear()

    def seconds(self) -> tuple[list[float], list[float]]:
        """Returns the seconds of each call on the host, and on the stream; on a CPU they are the same."""
        waits_s = [seconds for seconds, _, _ in self._calls]
        if self._device.type != "cuda":
            return waits_s, waits_s
        torch.cuda.synchronize(self._device)
        return waits_s, [before.elapsed_time(after) / 1e3 for _, before, after in self._calls]

    def _event(self) -> Any:
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _timed(action: Callable[[], object], count: int, device: torch.device) -> float:
    """Returns the seconds that the action takes, over `count` in a row."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start_s = time.perf_counter()
    for _ in range(count):
        action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start_s) / count
