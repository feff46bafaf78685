"""Whether sparse deltas are worth their bits in full fine-tuning: `python -m benchmarks.quality.sparse`.

A model that was trained on Python learns C++ headers at a low rate. Four learners keep float32 weights, compute with
them in bfloat16 precision, and exchange deltas every 24 steps. What a coding leaves out is added to the next delta. A
coding is judged by its share of what float32 deltas gain.

Source: "pulse" sends what changes bfloat16 weights, as PULSELoCo (arXiv 2602.03839v2) does; "top-k" the largest 1/64
of each 4096 elements in 2 bits, with the remainder decayed by 0.95, as SparseLoCo (arXiv 2508.15706) does. "int4, H =
96" spends fewer bits in another way: it exchanges less often.
"""

from __future__ import annotations

import copy
import json
import statistics
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Final, NamedTuple

import click
import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from benchmarks.quality.jobs import whole_records
from benchmarks.quality.statistics import estimate
from benchmarks.report import DIRECTORY
from skerry.wire.codecs import Codec, compress
from skerry.wire.layout import Blocks
from skerry.wire.quantise import quantise
from skerry_learner.batches import Batch, BatchSampler, held_out_batches
from skerry_learner.corpus import Corpus, load_corpus
from skerry_learner.inner_training import evaluate, inner_step, make_optimizer
from skerry_learner.model import Gpt
from skerry_learner.schedule import learning_rate
from skerry_learner.settings import MODEL_CONFIGS

COMMITTED: Final = Path(__file__).parent / "results" / "sparse.jsonl"
STEPS: Final = (240, 960)
RATES: Final = (1e-5, 1e-6)
SEEDS: Final = (0, 1)
LEARNER_COUNT: Final = 4
H: Final = 24
SELDOM: Final = "int4, H = 96"
_BASE_STEPS: Final = 800
_BASE_RATE: Final = 1.2e-2
_BATCH: Final = 8
_CONFIG: Final = MODEL_CONFIGS["nano"]
_OUTER_RATE: Final = 0.55
_OUTER_MOMENTUM: Final = 0.8
_CHUNK: Final = 4096
_KEPT: Final = 64  # of a chunk
_DECAY: Final = 0.95

Vector = NDArray[np.float32]


class Coded(NamedTuple):
    """What a receiver decodes of a tensor's delta, and the bytes that carry it after zstd."""

    decoded: Vector
    size_bytes: int


def float32(_: Vector, delta: Vector) -> Coded:
    """Sends everything."""
    return Coded(delta, delta.nbytes)


def int4(_: Vector, delta: Vector) -> Coded:
    """Sends 4 bits an element and a scale for every 256, as the product does; vectors are float32."""
    edges = np.append(np.arange(0, delta.size, 256), delta.size).astype(np.uint64)
    decoded = np.empty_like(delta)
    raw = quantise(Codec.INT4, delta, Blocks(256, edges), decoded)
    assert raw is not None
    return Coded(decoded, len(compress(raw.data)))


def pulse(anchor: Vector, delta: Vector) -> Coded:
    """Sends, in bfloat16, the elements that change a bfloat16 weight."""
    seen = np.flatnonzero(_bfloat16(anchor + delta) != _bfloat16(anchor))
    values = _bfloat16(delta[seen])
    decoded = np.zeros_like(delta)
    decoded[seen] = values
    return Coded(decoded, _size(_gaps(seen), values.view(np.uint32) >> np.uint32(16)))


def top_k(_: Vector, delta: Vector) -> Coded:
    """Sends the largest 64 of each 4096 elements as signs of one of two sizes."""
    decoded = np.zeros_like(delta)
    kept = []
    for first in range(0, delta.size, _CHUNK):
        chunk = np.abs(delta[first : first + _CHUNK])
        count = max(1, chunk.size * _KEPT // _CHUNK)
        kept.append(first + np.sort(np.argpartition(chunk, -count)[-count:]))
    seen = np.concatenate(kept)
    sizes = np.abs(delta[seen])
    is_large = sizes > sizes.mean()
    levels = [float(sizes[part].mean()) if part.any() else 0.0 for part in (~is_large, is_large)]
    decoded[seen] = np.sign(delta[seen]) * np.where(is_large, levels[1], levels[0])
    codes = np.packbits(np.stack([is_large, delta[seen] > 0]))
    return Coded(decoded, _size(_gaps(seen), codes) + 8)


CODINGS: Final[Mapping[str, Callable[[Vector, Vector], Coded]]] = {
    "float32": float32,
    "int4": int4,
    SELDOM: int4,
    "pulse": pulse,
    "top-k": top_k,
}


class Arm(NamedTuple):
    """One training."""

    step_count: int
    rate: float
    coding: str
    seed: int


class Outcome(NamedTuple):
    """Held-out losses before and after, and the bits of a parameter that a learner sent in 24 steps."""

    loss_before: float
    loss: float
    bits: float


def _bfloat16(values: Vector) -> Vector:
    rounded: Vector = torch.from_numpy(values).bfloat16().float().numpy()
    return rounded


def _gaps(indices: NDArray[np.int64]) -> NDArray[np.uint16]:
    """Returns the distances of sorted indices, as 16 bits each; a longer one is its last 16 bits."""
    return np.diff(indices, prepend=-1).astype(np.uint16)


def _size(*columns: NDArray[np.unsignedinteger]) -> int:
    """Returns the bytes of columns after zstd, of which each byte is a stream of its own."""
    total = 0
    for column in columns:
        width = 2 if column.dtype.itemsize > 1 else 1
        planes = np.ascontiguousarray(column.astype(f"<u{width}")).view(np.uint8).reshape(-1, width).T
        total += sum(len(compress(plane.copy().data)) for plane in planes if plane.size)
    return total


def train(arm: Arm) -> Outcome:
    """Fine-tunes under one coding of the deltas; weights and steps are the same for all until the first merge."""
    torch.set_num_threads(1)
    model = copy.deepcopy(_base(arm.seed))
    held_out = held_out_batches(_corpus("c++").held_out, _CONFIG, batch_size=64, window_count=1600)
    anchor = [parameter.detach().clone() for parameter in model.parameters()]
    before = _judge(model, anchor, held_out)
    outer = torch.optim.SGD(anchor, lr=_OUTER_RATE, momentum=_OUTER_MOMENTUM, nesterov=True)
    learners = [_Learner(arm, number) for number in range(1, LEARNER_COUNT + 1)]
    size_bytes = 0
    length = 4 * H if arm.coding == SELDOM else H
    for first in range(0, arm.step_count, length):
        steps = range(first, min(first + length, arm.step_count))
        deltas = [learner.round(anchor, steps) for learner in learners]
        size_bytes += sum(learner.sent_bytes for learner in learners)
        for index, weights in enumerate(anchor):
            weights.grad = -torch.stack([delta[index] for delta in deltas]).mean(dim=0)
        outer.step()
    numel = sum(weights.numel() for weights in anchor)
    bits = 8 * size_bytes / (numel * LEARNER_COUNT * arm.step_count / H)
    return Outcome(before, _judge(model, anchor, held_out), bits)


class _Learner:
    """One learner's weights, inner optimizer, data, and what its codings left out so far."""

    def __init__(self, arm: Arm, number: int) -> None:
        self._arm = arm
        self._model = copy.deepcopy(_base(arm.seed))  # in bfloat16 precision
        self._master = copy.deepcopy(self._model)
        self._optimizer = make_optimizer(self._master, "adamw", betas=(0.9, 0.95))
        shard = _corpus("c++", (number, LEARNER_COUNT)).train
        name = f"learner-{number}"
        self._sampler = BatchSampler(shard, _CONFIG, batch_size=_BATCH, seed=arm.seed, learner=name)
        self._left = [np.zeros(parameter.shape, np.float32).reshape(-1) for parameter in self._model.parameters()]
        self.sent_bytes = 0

    def round(self, anchor: list[Tensor], steps: Iterable[int]) -> list[Tensor]:
        """Trains from the anchor, and returns what a receiver decodes of the delta."""
        master, shown = list(self._master.parameters()), list(self._model.parameters())
        with torch.no_grad():
            for mine, weights in zip(master, anchor, strict=True):
                mine.copy_(weights)
        for step in steps:
            with torch.no_grad():
                for mine, low in zip(master, shown, strict=True):
                    low.copy_(mine.bfloat16())
            rate = learning_rate(step, peak=self._arm.rate, warmup_steps=H, horizon_steps=self._arm.step_count)
            batch = self._sampler.batch(step)
            self._model.zero_grad()
            self._model.loss(batch.tokens, batch.targets).backward()  # type: ignore[no-untyped-call]
            for mine, low in zip(master, shown, strict=True):
                mine.grad = low.grad
            self._optimizer.step(rate)
        return self._send(anchor, [mine.detach() for mine in master])

    def _send(self, anchor: list[Tensor], weights: Iterable[Tensor]) -> list[Tensor]:
        self.sent_bytes, decoded = 0, []
        for index, (old, new) in enumerate(zip(anchor, weights, strict=True)):
            start = old.numpy().reshape(-1)
            delta = new.numpy().reshape(-1) - start + self._left[index]
            is_vector = old.ndim < 2
            code = float32 if is_vector and CODINGS[self._arm.coding] is int4 else CODINGS[self._arm.coding]
            sent = code(start, delta)
            decay = _DECAY if self._arm.coding == "top-k" else 1.0
            self._left[index] = decay * (delta - sent.decoded)
            self.sent_bytes += sent.size_bytes
            decoded.append(torch.from_numpy(sent.decoded).reshape(old.shape))
        return decoded


def _judge(model: Gpt, weights: list[Tensor], held_out: list[Batch]) -> float:
    """Returns the held-out loss of weights in bfloat16 precision, in nats a byte."""
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), weights, strict=True):
            parameter.copy_(value.bfloat16())
    return evaluate(model, held_out)


@lru_cache(1)
def _base(seed: int) -> Gpt:
    """Returns a model that was trained on Python."""
    torch.manual_seed(seed)
    model = Gpt(_CONFIG)
    optimizer = make_optimizer(model, "adamw", betas=(0.9, 0.95))
    sampler = BatchSampler(_corpus("python").train, _CONFIG, batch_size=2 * _BATCH, seed=seed, learner="base")
    for step in range(_BASE_STEPS):
        rate = learning_rate(step, peak=_BASE_RATE, warmup_steps=50, horizon_steps=_BASE_STEPS)
        inner_step(model, optimizer, sampler.batch(step), rate=rate)
    return model


@lru_cache
def _corpus(text: str, shard: tuple[int, int] = (1, 1)) -> Corpus:
    path = None if text == "python" else Path(torch.__file__).parent / "include" / "ATen"
    return load_corpus(path, shard=shard)


def read(path: Path) -> dict[Arm, Outcome]:
    """Returns the outcomes in a file, of which there may be none."""
    return {Arm(*record["arm"]): Outcome(*record["outcome"]) for record in whole_records(path)}


def _table(known: Mapping[Arm, Outcome]) -> Table:
    columns = ("steps", "rate", "coding", "bits", "share of float32's gain")
    table = Table(*columns, title="fine-tuning: bits a parameter that a learner sends in 24 steps, after zstd")
    for steps, rate, coding in product(STEPS, RATES, CODINGS):
        trained = [Arm(steps, rate, coding, seed) for seed in SEEDS]
        pairs = [(known[arm], known[arm._replace(coding="float32")]) for arm in trained]
        gains = [(mine.loss_before - mine.loss) / (best.loss_before - best.loss) for mine, best in pairs]
        share = estimate(gains)
        bits = statistics.fmean(mine.bits for mine, _ in pairs)
        table.add_row(str(steps), f"{rate:g}", coding, f"{bits:.2f}", f"{share.mean:.3f} ± {share.half_width or 0:.3f}")
    return table


@click.command()
@click.option("--committed", is_flag=True, help="Show the committed results; train nothing.")
@click.option("--processes", type=click.IntRange(min=1), default=1, show_default=True, help="Arms at a time.")
def main(*, committed: bool, processes: int) -> None:
    """Fine-tune with each coding of the deltas, and print bits and gains."""
    path = COMMITTED if committed else DIRECTORY / "quality-sparse.jsonl"
    known = read(path)
    missing = [] if committed else [arm for arm in arms() if arm not in known]
    if missing:
        path.parent.mkdir(parents=True, exist_ok=True)
        with ProcessPoolExecutor(processes) as pool, path.open("a") as file:
            trained = zip(missing, pool.map(train, missing), strict=True)
            for arm, outcome in track(trained, "training", total=len(missing)):
                known[arm] = outcome
                print(json.dumps({"arm": arm, "outcome": outcome}), file=file, flush=True)
    Console().print(_table(known))


def arms() -> list[Arm]:
    """Returns all arms of the table."""
    return [Arm(*cell, seed) for seed in SEEDS for cell in product(STEPS, RATES, CODINGS)]


if __name__ == "__main__":
    main()
