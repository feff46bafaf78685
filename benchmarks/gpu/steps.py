"""Training a GPT with and without Skerry, in turns, and what the exchange takes of the training thread.

One learner beside a real `skerry serve` on the same machine; with 24 fragments and H steps between two deltas, one
fragment moves every H / 24 steps. Without Skerry means that `step()` is not called; the exchange is idle then. Where
training has queued more than the device takes, launches wait, those of `step()` too; so its time is taken in steps that
begin with an idle device.

Threads of one process share Python's interpreter, and take turns every 5 ms. The rows of 0.5 ms say how much of the
exchange's cost is waiting for a turn.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple

import torch

from benchmarks.gpu.part_run import PartRun
from benchmarks.processes import Served, served
from benchmarks.report import Row, measured
from benchmarks.speed.measuring import SEED, paired
from skerry import Learner, Policy
from skerry_learner.model import Gpt
from skerry_learner.settings import MODEL_CONFIGS, ModelConfig

_FRAGMENTS: Final = 24
_H: Final = 48
_BLOCK_S: Final = 2.0  # a block of steps lasts at least so long
_LEAST_STEPS: Final = 24  # of a block: in so many, half of the fragments move
_SHORT_TURN_S: Final = 0.0005
_COMPILING_S: Final = 40.0


@dataclass(frozen=True)
class Case:
    """A model and how it is trained."""

    config: ModelConfig
    batch: int
    dtype: torch.dtype  # of the weights; all compute in bfloat16
    sample_count: int
    compiles_blocks: bool  # each by itself, which takes less time where there are many
    least_s: float  # on an H200, without compiling


class _Subject(NamedTuple):
    title: str
    parameter_count: int
    token_count: int  # of a step
    sample_count: int
    learner: Learner
    syncer: Served


class _Mode(NamedTuple):
    name: str
    is_on: bool
    turn_s: float


def _cases(run: PartRun) -> Iterator[Case]:
    if run.is_quick:
        yield Case(replace(MODEL_CONFIGS["nano"], context=32), 2, torch.bfloat16, 1, True, 0.0)
        return
    yield Case(replace(MODEL_CONFIGS["base"], vocabulary=50304), 16, torch.float32, 3, False, 35.0)
    yield Case(MODEL_CONFIGS["large"], 4, torch.bfloat16, 2, True, 100.0)


def rows(run: PartRun) -> Iterator[Row]:
    """Weights of 124M parameters in float32 and of 1B in bfloat16, each eager and compiled."""
    for case in _cases(run):
        torch.manual_seed(SEED)
        model = Gpt(case.config).to(device=run.device, dtype=case.dtype)
        title = (
            f"{model.parameter_count / 1e6:.3g}M parameters in {str(case.dtype).removeprefix('torch.')}, "
            f"{case.batch} x {case.config.context} tokens, H = {_H}"
        )
        if row := run.skipped(title, case.least_s):
            yield row
            continue
        with tempfile.TemporaryDirectory(prefix="skerry-benchmark-") as name, served(Path(name)) as syncer:
            yield from _rows(title, case, model, syncer, run)
        del model
        if run.device.type == "cuda":
            torch.cuda.empty_cache()


def _rows(title: str, case: Case, model: Gpt, syncer: Served, run: PartRun) -> Iterator[Row]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(case.config.vocabulary, (case.batch, case.config.context + 1), device=run.device)
    backend = "inductor" if run.device.type == "cuda" else "eager"  # compiling for a CPU takes long

    def training(loss_of: Callable[..., torch.Tensor]) -> Callable[[], None]:
        def train() -> None:
            with torch.autocast(run.device.type, dtype=torch.bfloat16):
                loss = loss_of(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return train

    train = training(model.loss)
    train()  # the optimizer's state, before the learner takes memory
    joined_s = time.perf_counter()
    learner = Learner(
        model,
        target=syncer.target,
        run="steps",
        learner_id="gpu",
        create=True,
        policy=Policy(inner_step_count=_H, lease_term_s=120.0),
        fragment_count=_FRAGMENTS,
        connect_timeout_s=120.0,
    )
    with closing(learner):
        run.wait()
        yield measured(title, "creating the run and joining", [time.perf_counter() - joined_s], "s")
        subject = _Subject(
            f"{title}, eager", model.parameter_count, tokens[:, 1:].numel(), case.sample_count, learner, syncer
        )
        yield from _speed_rows(subject, train, run)
        title += ", compiled by block" if case.compiles_blocks else ", compiled"
        if row := run.skipped(title, run.pick(case.least_s / 2 + _COMPILING_S, 0.0)):
            yield row
            return
        compiled = training(_compiled(model, case, backend))
        compiled_s = time.perf_counter()
        compiled()
        run.wait()
        yield measured(title, "compiling", [time.perf_counter() - compiled_s], "s")
        yield from _speed_rows(subject._replace(title=title), compiled, run)


def _compiled(model: Gpt, case: Case, backend: str) -> Callable[..., torch.Tensor]:
    if not case.compiles_blocks:
        compiled: Callable[..., torch.Tensor] = torch.compile(model.loss, backend=backend)
        return compiled
    for block in model.blocks:
        block.compile(backend=backend)
    return model.loss


def _speed_rows(subject: _Subject, train: Callable[[], None], run: PartRun) -> Iterator[Row]:
    title, learner, syncer = subject.title, subject.learner, subject.syncer
    usual_turn_s = sys.getswitchinterval()
    for _ in range(3):
        train()
    step_s = _timed(train, 5, run)
    block = _LEAST_STEPS if run.is_quick else max(_LEAST_STEPS, round(_BLOCK_S / step_s))

    def both() -> None:
        train()
        learner.step(tokens=subject.token_count)

    _timed(both, _LEAST_STEPS, run)
    modes = (
        _Mode("with", True, usual_turn_s),
        _Mode("short", True, _SHORT_TURN_S),
        _Mode("without", False, usual_turn_s),
    )
    speeds: dict[str, list[float]] = {mode.name: [] for mode in modes}
    others_ms: dict[str, list[float]] = {mode.name: [] for mode in modes}
    for _, mode in itertools.product(range(subject.sample_count), modes):
        sys.setswitchinterval(mode.turn_s)
        cpu_s = time.process_time() - time.thread_time()
        speeds[mode.name].append(1 / _timed(both if mode.is_on else train, block, run))
        others_ms[mode.name].append(1e3 * (time.process_time() - time.thread_time() - cpu_s) / block)
        syncer.wait_idle(10.0)  # or what was sent in one block would burden the next
    sys.setswitchinterval(usual_turn_s)
    added_s = [_H * (1 / on - 1 / off) for on, off in zip(speeds["with"], speeds["without"], strict=True)]
    cpu_ms = zip(others_ms["with"], others_ms["without"], strict=True)
    exchange_s = [max(1e-9, _H * (on - off) / 1e3) for on, off in cpu_ms]
    flops = 6 * subject.parameter_count * subject.token_count
    teraflops = [flops * speed / 1e12 for speed in speeds["without"]]
    yield measured(title, "training without Skerry, by 6 N a token", teraflops, "TFLOP/s")
    yield paired(title, "training speed, with / without", speeds["with"], "steps/s", limits=speeds["without"])
    yield paired(title, "the same, turns of 0.5 ms", speeds["short"], "steps/s", limits=speeds["without"])
    yield paired(
        title, "CPU of other threads, with / without", others_ms["with"], "ms/step", limits=others_ms["without"]
    )
    # What training does not wait for is hidden behind its computation.
    yield paired(title, "added to training in H steps / CPU of the exchange", added_s, "s", limits=exchange_s)
    launches_ms, _ = _launches(train, lambda: None, block, run)
    launches_on_ms, waits_ms = _launches(train, lambda: learner.step(tokens=subject.token_count), block, run)
    # Where this is longer than a step, the device waits for Python.
    yield measured(title, "launching a step, mean / step", [fmean(launches_ms)], "ms", limit=1e3 * step_s)
    yield measured(title, "the same beside the exchange", [fmean(launches_on_ms)], "ms", limit=1e3 * step_s)
    yield measured(title, "time in step(), median / step", waits_ms, "ms", limit=1e3 * step_s)
    yield measured(title, "time in step(), longest / step", [max(waits_ms)], "ms", limit=1e3 * step_s)
    yield measured(title, "deltas merged", [float(learner.stats.deltas_merged)], "")


def _launches(
    train: Callable[[], None], step: Callable[[], object], count: int, run: PartRun
) -> tuple[list[float], list[float]]:
    """Returns the milliseconds in which training queues each step on an idle device, and those of what follows it."""
    launches_ms, waits_ms = [], []
    for _ in range(count):
        start_s = time.perf_counter()
        train()
        launches_ms.append(1e3 * (time.perf_counter() - start_s))
        run.wait()
        start_s = time.perf_counter()
        step()
        waits_ms.append(1e3 * (time.perf_counter() - start_s))
    return launches_ms, waits_ms


def _timed(action: Callable[[], object], count: int, run: PartRun) -> float:
    """Returns the seconds that the action takes, over `count` in a row."""
    run.wait()
    start_s = time.perf_counter()
    for _ in range(count):
        action()
    run.wait()
    return (time.perf_counter() - start_s) / count
