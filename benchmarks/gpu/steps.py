"""Training a GPT with and without Skerry, in turns, and how long `step()` takes of the training thread.

One learner beside a real `skerry serve` on the same machine; with 24 fragments and H steps between two deltas, one
fragment moves every H / 24 steps. Without Skerry means that `step()` is not called; the exchange is idle then. Where
training has queued more than the device takes, launches wait, those of `step()` too; so its time is taken in steps that
begin with an idle device.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from benchmarks.processes import Served, served
from benchmarks.report import Row, measured
from benchmarks.speed.measuring import SEED, Size, paired
from skerry import Learner, Policy
from skerry_learner.model import Gpt
from skerry_learner.settings import MODEL_CONFIGS, ModelConfig

_FRAGMENTS: Final = 24
_BLOCK_S: Final = 2.5  # a block of steps lasts at least so long
_LEAST_STEPS: Final = 48  # of a block, and before the first one


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
    for is_compiled, inner_step_count in itertools.product((False, True), (48, 240)):
        yield Case(small, 16, inner_step_count, is_compiled)
    yield Case(large, 4, 240)
    yield Case(large, 4, 240, is_compiled=True, dtype=torch.bfloat16)


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
        f"{', compiled' if case.is_compiled else ''}, {case.batch} x {case.config.context} tokens, "
        f"H = {case.inner_step_count}"
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
    block = _LEAST_STEPS if size.is_quick else max(_LEAST_STEPS, round(_BLOCK_S / step_s))

    def both() -> None:
        train()
        learner.step(tokens=count)

    _timed(both, min(case.inner_step_count, _LEAST_STEPS), device)
    speeds: dict[bool, list[float]] = {True: [], False: []}
    for _, is_on in itertools.product(range(size.samples), (True, False)):
        speeds[is_on].append(1 / _timed(both if is_on else train, block, device))
        syncer.wait_idle()  # or what was sent in one block would burden the next
    waits_ms = []
    for _ in range(block):
        train()
        _wait(device)
        start_s = time.perf_counter()
        learner.step(tokens=count)
        waits_ms.append(1e3 * (time.perf_counter() - start_s))
    stats = learner.stats
    learner.close()
    teraflops = [6 * model.parameter_count * count * speed / 1e12 for speed in speeds[False]]
    yield measured(title, "training without Skerry, by 6 N a token", teraflops, "TFLOP/s")
    yield paired(title, "training speed, with / without", speeds[True], "steps/s", limits=speeds[False])
    yield measured(title, "time in step(), median / step", waits_ms, "ms", limit=1e3 * step_s)
    yield measured(title, "time in step(), longest / step", [max(waits_ms)], "ms", limit=1e3 * step_s)
    yield measured(title, "deltas merged", [float(stats.deltas_merged)], "")
    yield measured(title, "creating the run and joining", [joined_s], "s")


def _timed(action: Callable[[], object], count: int, device: torch.device) -> float:
    """Returns the seconds that the action takes, over `count` in a row."""
    _wait(device)
    start_s = time.perf_counter()
    for _ in range(count):
        action()
    _wait(device)
    return (time.perf_counter() - start_s) / count


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
