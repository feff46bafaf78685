"""Runs jobs on all processor cores and keeps every outcome in a file, so that nothing is ever trained twice."""

from __future__ import annotations

import dataclasses
import gc
import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.quality.arms import DataParallel, Island, Islands, Job, Outcome, Synchronous


class Outcomes:
    """Outcomes by job, in a file of one line each. Start a new file when the product or the task changes."""

    def __init__(self, path: Path) -> None:
        """Reads what is there."""
        self._path = path
        self._known: dict[Job, Outcome] = {}
        for record in whole_records(path):
            self._known[_job(record)] = _outcome(record["outcome"])

    def __getitem__(self, job: Job) -> Outcome:
        """Returns the outcome of a job that was run."""
        return self._known[job]

    def __contains__(self, job: Job) -> bool:
        """Whether the job was run."""
        return job in self._known

    def __iter__(self) -> Iterator[Job]:
        """Yields the jobs that were run."""
        return iter(self._known)

    def add(self, job: Job, outcome: Outcome) -> None:
        """Keeps an outcome, durably as far as this process's death goes."""
        self._known[job] = outcome
        self._path.parent.mkdir(parents=True, exist_ok=True)
        record = {
            "kind": type(job.arm).__name__,
            "arm": dataclasses.asdict(job.arm),
            "seed": job.seed,
            "outcome": dataclasses.asdict(outcome),
        }
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def whole_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the records of a file, if there is one; cuts off the last if only its beginning was written."""
    text = path.read_text() if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        os.truncate(path, len(whole.encode()))
    return map(json.loads, whole.splitlines())


def run_jobs(jobs: Iterable[Job], outcomes: Outcomes, *, process_count: int | None = None) -> None:
    """Runs every job whose outcome is not known yet, the longest first, with a bar that says how far it is."""
    missing = {job for job in jobs if job not in outcomes}
    if not missing:
        return
    waiting = sorted(missing, key=_cost, reverse=True)
    columns = (
        TextColumn("training"),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    total = sum(_cost(job) for job in waiting)
    context = multiprocessing.get_context("spawn")
    with (
        Progress(*columns) as progress,
        ProcessPoolExecutor(process_count or os.cpu_count(), mp_context=context, initializer=prepare_process) as pool,
    ):
        bar = progress.add_task("training", total=total)
        futures = {pool.submit(run_job, job): job for job in waiting}
        failures = []
        try:
            for future in as_completed(futures):
                job = futures[future]
                if future.cancelled():
                    continue
                if error := future.exception():  # it is told once the jobs at work have ended
                    failures.append(error)
                    for other in futures:
                        other.cancel()
                    continue
                outcomes.add(job, future.result())
                progress.update(bar, advance=_cost(job))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    if failures:
        raise failures[0]


def run_job(job: Job) -> Outcome:
    """Trains one arm under one seed."""
    begun_s = time.perf_counter()
    try:
        outcome = _run(job)
    except Exception as error:
        # Errors of the product take more arguments than pickle gives back, and would break the pool instead.
        raise RuntimeError(f"job failed. job={job}, cause={traceback.format_exc()}") from error
    return dataclasses.replace(outcome, wall_s=time.perf_counter() - begun_s)


def _run(job: Job) -> Outcome:
    # Here, so that the parent process needs neither torch's threads nor its memory.
    from benchmarks.quality.rivals import train_data_parallel, train_synchronous
    from benchmarks.quality.world import train_islands

    match job.arm:
        case DataParallel():
            return train_data_parallel(job.arm, job.seed)
        case Synchronous():
            return train_synchronous(job.arm, job.seed)
        case Islands():
            return train_islands(job.arm, job.seed)


def _cost(job: Job) -> float:
    """Steps of one learner's batch, about."""
    arm = job.arm
    if isinstance(arm, Islands):
        return arm.step_count * sum(min(1.0, island.speed) for island in arm.islands)
    return arm.step_count * arm.learner_count


def prepare_process() -> None:
    """Gives torch one thread, and spares the collector the modules: they cost a small model a quarter of its time."""
    import torch

    import benchmarks.quality.rivals
    import benchmarks.quality.world  # noqa: F401 - to be frozen

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


def _job(record: Mapping[str, Any]) -> Job:
    arm: dict[str, Any] = {
        name: tuple(value) if name == "judged_on" else value for name, value in record["arm"].items()
    }
    if record["kind"] != Islands.__name__:
        kinds: tuple[type[DataParallel | Synchronous], ...] = (DataParallel, Synchronous)
        return Job(next(kind for kind in kinds if kind.__name__ == record["kind"])(**arm), record["seed"])
    islands = tuple(
        Island(**{**island, "absent": tuple(tuple(span) for span in island["absent"])}) for island in arm["islands"]
    )
    return Job(Islands(**{**arm, "islands": islands}), record["seed"])


def _outcome(values: Mapping[str, Any]) -> Outcome:
    return Outcome(**{**values, "step_counts": tuple(values["step_counts"])})
