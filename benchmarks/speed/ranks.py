"""What the ranks of a learner with `fully_shard` pay: peak memory over training alone, and time in `step`.

    python -m benchmarks.speed.ranks [--ranks 4] [--versions 2]

Each rank trains a model of 50M parameters in float32, alone and then as a learner of a run, until every fragment has
some versions; the peak is that of its resident size after two real steps, which includes joining. The other steps are
made up, since gathering the layers takes seconds a step on two cores, and hold no gradients, which come on top. The
same for a model of 2M parameters says what libraries, compiled kernels and connections take; the difference between the
two is given in shards. Of the time in `step` the median is printed, and the longest, in which fragments of 8M
parameters moved. The processes run with MALLOC_MMAP_THRESHOLD_=65536, without which glibc keeps freed vectors.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.processes import forget_peak, served, status_bytes
from benchmarks.report import Row, measured, write_rows
from skerry import Learner

_WIDTH: Final = 1024  # a layer has 2**20 parameters, 4 MiB
_LAYERS: Final = {"50M": 48, "2M": 2}
_REAL_STEPS: Final = 2
_ALONE_STEPS: Final = 4
_MIB: Final = 2**20
_THRESHOLD: Final = "65536"


def _shards(model: nn.Module) -> Iterator[torch.Tensor]:
    for one in model.parameters():
        assert isinstance(one, DTensor)
        yield one.to_local().detach()


def _train(model: nn.Module) -> None:
    loss: Any = model(torch.randn(2, _WIDTH)).square().mean()
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()


def _make_up_a_step(model: nn.Module) -> None:
    for shard in _shards(model):
        shard.add_(torch.randn_like(shard), alpha=1e-3)


def _rank(
    connection: Connection, number: int, count: int, *, folder: str, layers: int, target: str, versions: int
) -> None:
    """Trains on one rank; answers the peak of its resident size, the fragments and the seconds of its steps."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = distributed.FileStore(folder, count)  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=number, world_size=count)
    with torch.device("meta"):  # no rank ever holds the whole model
        model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(layers)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    for shard in _shards(model):
        nn.init.normal_(shard, std=_WIDTH**-0.5)
    for _ in range(_REAL_STEPS):
        _train(model)
    forget_peak(os.getpid())  # which gradients have raised; they come on top of what is measured
    fragments, taken_s = 0, [0.0]
    if target:
        with Learner(model, target=target, run="memory", learner_id="island", create=True) as learner:
            while min(learner.stats.versions.values()) < versions:
                _make_up_a_step(model)
                begin_s = time.perf_counter()
                learner.step(tokens=2)
                taken_s.append(time.perf_counter() - begin_s)
            fragments = len(learner.stats.versions)
    else:
        for _ in range(_ALONE_STEPS):
            _make_up_a_step(model)
    connection.send((status_bytes(os.getpid(), "VmHWM"), fragments, taken_s))
    distributed.barrier()
    distributed.destroy_process_group()


def _peaks(layers: int, count: int, target: str, versions: int, folder: Path) -> list[float]:
    """Returns each rank's peak in MiB."""
    context = multiprocessing.get_context("spawn")
    given = {"folder": str(folder / "group"), "layers": layers, "target": target, "versions": versions}
    pairs = [context.Pipe() for _ in range(count)]
    ranks = [
        context.Process(target=_rank, args=(theirs, number, count), kwargs=given)
        for number, (_, theirs) in enumerate(pairs)
    ]
    for rank in ranks:
        rank.start()
    for _, theirs in pairs:
        theirs.close()
    answers = [ours.recv() for ours, _ in pairs]
    for rank in ranks:
        rank.join()
    if target:
        _, fragments, taken_s = answers[0]
        times = f"median {median(taken_s) * 1e3:.1f} ms, longest {max(taken_s) * 1e3:.1f} ms"
        print(f"{layers} layers: {fragments} fragments, {len(taken_s)} steps, {times}", flush=True)
    return [peak / _MIB for peak, *_ in answers]


def _added(layers: int, count: int, versions: int) -> list[float]:
    """Returns what each rank's peak grows by, in MiB."""
    with tempfile.TemporaryDirectory(prefix="skerry-benchmark-") as name:
        folder = Path(name)
        alone = _peaks(layers, count, "", versions, folder)
        (folder / "group").unlink(missing_ok=True)
        with served(folder) as syncer:
            together = _peaks(layers, count, syncer.target, versions, folder)
    print(f"{layers} layers, MiB: alone {alone}, in a run {together}", flush=True)
    return [more - less for more, less in zip(together, alone, strict=True)]


def rows(count: int, versions: int) -> Iterator[Row]:
    """The first rank, and the others, for both models, and the difference in shards."""
    added = {name: _added(layers, count, versions) for name, layers in _LAYERS.items()}
    for name, peaks in added.items():
        case = f"{name} parameters on {count} ranks"
        yield measured(f"{case}, the first", "peak over training alone", peaks[:1], "MiB")
        yield measured(f"{case}, the others", "peak over training alone", peaks[1:], "MiB")
    shard = _LAYERS["50M"] * _WIDTH**2 * 4 / _MIB / count
    for who, part in (("first", slice(0, 1)), ("others", slice(1, None))):
        # Of the small model some ranks encode and decode nothing, and so have no compiled kernels.
        large, small = added["50M"][part], max(added["2M"][part])
        samples = [(one - small) / shard for one in large]
        yield measured(f"{count} ranks, the {who}", "difference of the two models", samples, "shards")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="Peak memory of the ranks of a sharded island.")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--versions", type=int, default=2)
    arguments = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = _THRESHOLD  # of the processes that are yet to start
    write_rows("ranks", rows(arguments.ranks, arguments.versions))


if __name__ == "__main__":
    main()
