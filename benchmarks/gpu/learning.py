"""What four learners learn on a GPU, in virtual time: the arms of the quality benchmark, on a model of 4.8M parameters.

One learner alone, four of them, four whose answers come H/2 steps late, and one model that is trained on all four
batches. The arms train at the same time, in a process each. A short round of them says how many steps the time is
enough for; the long round takes as many, up to 20 tokens a parameter for a learner.

Learning rates are not tuned: all batches in one place get twice the rate of one batch.
"""

from __future__ import annotations

import multiprocessing
import os
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from hashlib import sha256
from pathlib import Path
from typing import Final

from benchmarks.gpu.part_run import PartRun
from benchmarks.quality.arms import Arm, DataParallel, Island, Job, islands
from benchmarks.quality.jobs import prepare_process, run_job
from benchmarks.quality.nanogpt import TEXT_VARIABLE
from benchmarks.quality.task import BYTES, DEVICE_VARIABLE, GPU, PYTHON, task_of
from benchmarks.report import DIRECTORY, Row, measured
from skerry_learner.model import Gpt

_LEARNERS: Final = 4
_H: Final = 24
_RATE: Final = 3e-3
_SHORT_STEPS: Final = 240
_TOKENS_A_PARAMETER: Final = 20
_USED_SHARE: Final = 0.75  # of the time that is left: a long round that is cut off says nothing of the slowest arms
_SEED: Final = 0
_ALONE: Final = "one learner"
_TOGETHER: Final = "four learners' batches in one place"
_WALL: Final = "wall time"
_ENDING_S: Final = 5.0


def rows(run: PartRun) -> Iterator[Row]:
    """Losses of a short round and of a long one."""
    os.environ[DEVICE_VARIABLE] = run.device_name
    path = Path(run.data) if run.data else _write_sources(DIRECTORY / "sources.txt", run.pick(2**28, 2**20))
    os.environ[TEXT_VARIABLE] = str(path)
    task = run.pick(GPU, BYTES)
    settings = task_of(task)
    parameter_count = Gpt(settings.config).parameter_count
    token_count = settings.batch_size * settings.config.context  # of a step of one learner
    yield measured("text", "size", [path.stat().st_size / 1e6], "MB")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(run.pick(_LEARNERS, 1), mp_context=context, initializer=prepare_process) as pool:
        short, walls_s = run.pick(_SHORT_STEPS, 2 * _H), []
        for row in _round(pool, short, task):
            yield row
            walls_s += [row.value] * (row.metric == _WALL)
        if not walls_s:
            return
        most = run.pick(_TOKENS_A_PARAMETER * parameter_count // token_count, 3 * _H)
        long = min(most, int(short / max(walls_s) * _USED_SHARE * (run.left_s - _ENDING_S)))
        yield measured("long round", "steps of a learner", [float(long)], "", limit=float(most))
        yield measured("long round", "tokens of a learner / parameter", [long * token_count / parameter_count], "")
        tokens = (1 + 3 * _LEARNERS) * long * token_count
        yield measured("long round", "tokens of all arms", [tokens / 1e9], "G")
        if long > short:
            yield from _round(pool, long, task)


def arms(step_count: int, task: str) -> Mapping[str, Arm]:
    """Returns what is trained, by name."""
    batch_size = task_of(task).batch_size
    members = (Island(batch_size=batch_size),) * _LEARNERS
    policy = {"inner_step_count": _H}
    learners, late = (
        islands(_LEARNERS, step_count, _RATE, islands=members, policy=policy, task=task, **delay)
        for delay in ({}, {"delay": _H / 2})
    )
    return {
        "four learners": learners,
        "four learners, answers H/2 steps late": late,
        _TOGETHER: DataParallel(_LEARNERS, step_count, 2 * _RATE, batch_size=batch_size, task=task),
        _ALONE: DataParallel(1, step_count, _RATE, batch_size=batch_size, task=task),
    }


def _round(pool: ProcessPoolExecutor, step_count: int, task: str) -> Iterator[Row]:
    """Yields each arm's loss when it ends, and then how much of the gap between the ends each closes."""
    futures = {pool.submit(run_job, Job(arm, _SEED)): name for name, arm in arms(step_count, task).items()}
    losses = {}
    for future in as_completed(futures):
        case = f"{step_count} steps, {futures[future]}"
        if (error := future.exception()) is not None:
            sys.stderr.write(f"{case} failed:\n{error}\n")
            yield measured(case, "trained (1: yes)", [0.0], "", limit=1.0)
            continue
        outcome = future.result()
        losses[futures[future]] = loss = outcome.losses[PYTHON]
        yield measured(case, "held-out loss", [loss], "nats/byte")
        yield measured(case, _WALL, [outcome.wall_s], "s")
        for figure in ("merged_steps", "answer_steps", "members"):
            if figure in outcome.figures:
                yield measured(case, figure.replace("_", " "), [outcome.figures[figure]], "")
    if losses.keys() != set(futures.values()):
        return
    gap = losses[_ALONE] - losses[_TOGETHER]
    for name in losses.keys() - {_ALONE, _TOGETHER}:
        case = f"{step_count} steps, {name}"
        yield measured(case, "loss above one learner's", [100 * (losses[name] / losses[_ALONE] - 1)], "%")
        yield measured(case, "share of the gap closed", [(losses[_ALONE] - losses[name]) / gap], "")


def _write_sources(path: Path, most_bytes: int) -> Path:
    """Writes the Python sources of this environment into a file, in an order that mixes packages; returns the file."""
    folders = {sysconfig.get_paths()["stdlib"], *site.getsitepackages()}
    files = {file for folder in folders for file in Path(folder).rglob("*.py") if file.is_file()}
    size_bytes = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as text:
        for file in sorted(files, key=lambda file: sha256(str(file).encode()).digest()):
            if size_bytes < most_bytes:
                size_bytes += text.write(file.read_bytes())
    return path
