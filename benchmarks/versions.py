"""Bytes of a version of the whole model as `skerry follow` may write it, as a delta in each encoding.

One learner at the default settings (H = 24, int4 both ways). After each H steps a version in which every fragment is
new is compared with the one before, as bfloat16 and as float32.

- gpt: the reference learner's tiny GPT on Python's sources, trained for some steps at the first rate, then measured at
  each rate from there.
- random: 10.5M normal values of deviation 0.02, whose steps are normal with the rate as their deviation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import torch

from benchmarks.report import Row, measured, write_rows
from skerry import ArrayLearner, Follower, Learner, RunsClient
from skerry.checkpoints.deltas import ENCODINGS, Bytes, encode
from skerry.follower import Version
from skerry.v1.types_pb2 import Event
from skerry.wire.safetensors import tensor_bytes
from skerry_learner.batches import BatchSampler
from skerry_learner.corpus import load_corpus
from skerry_learner.inner_training import inner_step, make_optimizer
from skerry_learner.model import Gpt
from skerry_learner.settings import MODEL_CONFIGS
from tests.support.syncer_thread import syncer

H: Final = 24
VERSIONS: Final = 5  # measured
FIRST_STEPS: Final = 600
DTYPES: Final = {"bfloat16": 2, "float32": 4}


def all_new(follower: Follower, learner: ArrayLearner, step: Callable[[], None]) -> Iterator[Version]:
    """Yields versions each of which has a newer version of every fragment than the one before."""
    version = next(iter(follower))
    yield version
    while True:
        before = version.versions
        while any(version.versions[name] == before[name] for name in before):
            for _ in range(H):
                step()
            learner.flush(60)
            version = next(iter(follower))
        yield version


def rows_of(case: str, versions: Iterator[Version], client: RunsClient, run: str) -> Iterator[Row]:
    """Yields what the versions take, and the run's own updates beside them."""
    encoded: dict[str, list[float]] = {}
    old: dict[str, dict[str, Bytes]] = {}
    for version, number in zip(versions, range(1 + VERSIONS), strict=False):
        for dtype in DTYPES:
            arrays = version.arrays().items()
            new = {name: np.frombuffer(b"".join(tensor_bytes(values, dtype)), np.uint8) for name, values in arrays}
            for encoding in ENCODINGS if number else ():
                size_bytes = sum(len(encode(old[dtype][name], new[name], encoding)) for name in new)
                encoded.setdefault(f"{dtype} {encoding}", []).append(size_bytes)
            old[dtype] = new
    count = sum(values.size for values in version.arrays().values())
    end, sizes = client.get_run(run).run.position, []
    for message in client.watch(run, after_position=1):
        if isinstance(message, Event) and message.HasField("version_committed"):
            sizes.append(message.version_committed.update_size_bytes)
        if isinstance(message, Event) and message.position >= end:
            break
    fragments = len(version.versions)
    yield measured(case, "update of the run", [fragments * float(np.mean(sizes)) / count], "byte/parameter")
    for metric, values in encoded.items():
        full = DTYPES[metric.partition(" ")[0]]
        yield measured(case, metric, [value / count for value in values], "byte/parameter", limit=full)


def gpt_rows() -> Iterator[Row]:
    """Measures training and fine-tuning of a small GPT."""
    torch.manual_seed(0)
    config = MODEL_CONFIGS["tiny"]
    sampler = BatchSampler(load_corpus(None).train, config, batch_size=8, seed=0, learner="us")
    first = Gpt(config)
    optimizer = make_optimizer(first)
    for number in range(FIRST_STEPS):
        inner_step(first, optimizer, sampler.batch(number), rate=1e-3)
    for rate in (1e-3, 1e-5, 1e-6):
        model, number = copy.deepcopy(first), FIRST_STEPS
        optimizer = make_optimizer(model)
        with (
            syncer() as target,
            Learner(model, target=target, run="gpt", learner_id="us", create=True) as learner,
            Follower(target, "gpt") as follower,
        ):

            def step() -> None:
                nonlocal number
                inner_step(model, optimizer, sampler.batch(number), rate=rate)  # noqa: B023 - called at once
                learner.step(tokens=8 * config.context)
                number += 1

            yield from rows_of(f"gpt {rate:g}", all_new(follower, learner, step), follower.client, "gpt")


def random_rows() -> Iterator[Row]:
    """Measures random steps of a larger model."""
    for rate in (3e-4, 1e-5, 1e-6, 1e-7):
        numbers = np.random.default_rng(0)
        arrays: dict[str, Any] = {
            f"layer{number}.weight": (0.02 * numbers.standard_normal((1024, 1024))).astype(np.float32)
            for number in range(10)
        }
        noise = (rate * numbers.standard_normal(2**22)).astype(np.float32)
        with (
            syncer() as target,
            ArrayLearner(arrays, target=target, run="random", learner_id="us", create=True) as learner,
            Follower(target, "random") as follower,
        ):

            def step() -> None:
                for array in arrays.values():  # noqa: B023 - called at once
                    start = int(numbers.integers(len(noise) - array.size))  # noqa: B023 - called at once
                    array[:] -= noise[start : start + array.size].reshape(array.shape)  # noqa: B023 - called at once
                learner.step(tokens=1000)

            yield from rows_of(f"random {rate:g}", all_new(follower, learner, step), follower.client, "random")


if __name__ == "__main__":
    write_rows("versions", [*gpt_rows(), *random_rows()])
