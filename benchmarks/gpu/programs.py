"""Programs as users write them, each in processes of its own: every one must end with the weights of the run.

A row's value is 1 if the program trained, its deltas were merged, and its model has at the end, bit for bit, the run's
weights as the syncer hands them out; its error is printed otherwise. `python -m benchmarks.gpu.programs NAME DEVICE
TARGET` runs one of them.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import torch
from torch import distributed, multiprocessing, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.gpu.part_run import PartRun
from benchmarks.processes import environment, served
from benchmarks.report import Row, measured
from skerry import Learner, Policy, RunsClient, attach

# Trains until so many deltas were merged, and at most so many steps: a step takes about a millisecond.
_MERGED: Final = 8
_MOST_STEPS: Final = 20_000
_OPTIONS: Final[dict[str, Any]] = {"create": True, "policy": Policy(inner_step_count=8, lease_term_s=60.0)}
_TIMEOUT_S: Final = 60.0


def rows(run: PartRun) -> Iterator[Row]:
    """One row a program that this device can run; on a GPU they run at the same time."""
    is_gpu = run.device.type == "cuda"
    names = [name for name, program in PROGRAMS.items() if is_gpu or program not in _NEED_CUDA]
    if run.is_quick:
        names = [name for name in names if PROGRAMS[name] in (_two, _sharded)]
    with (
        tempfile.TemporaryDirectory(prefix="skerry-benchmark-") as folder,
        served(Path(folder)) as syncer,
        ThreadPoolExecutor(len(names) if is_gpu else 1) as threads,
    ):
        outcomes = threads.map(lambda name: _outcome(name, run.device, syncer.target), names)
        for name, (has_succeeded, output) in zip(names, outcomes, strict=True):
            if not has_succeeded:
                sys.stderr.write(f"{name} failed:\n{output[-4000:]}\n")
            yield measured(name, "ends with the run's weights (1: yes)", [float(has_succeeded)], "", limit=1.0)


def _outcome(name: str, device: torch.device, target: str) -> tuple[bool, str]:
    """Returns whether the program succeeded, and what it printed."""
    command = [sys.executable, "-m", "benchmarks.gpu.programs", name, device.type, target]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment(), timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        return False, f"it hung. output={error.stdout!r} {error.stderr!r}"
    return result.returncode == 0, result.stdout + result.stderr


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8))


def _data(count: int = 512) -> TensorDataset:
    inputs = torch.randn(count, 32, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs[:, :8].sin())


def _batches(learner: Learner, device: str, **options: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    loader = DataLoader(_data(), batch_size=16, shuffle=True, pin_memory=device == "cuda", **options)
    for inputs, wanted in itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), _MOST_STEPS):
        yield inputs.to(device, non_blocking=True), wanted.to(device, non_blocking=True)
        if learner.stats.deltas_merged >= _MERGED:
            return
    raise RuntimeError(f"too little was merged. stats={learner.stats}")


def _end(learner: Learner, model: nn.Module, run: str, target: str) -> None:
    """Leaves with the merged weights, and compares them with those that the syncer hands out."""
    assert learner.leave(60.0, load_merged=True), f"the last work was not merged. stats={learner.stats}"
    with RunsClient(target) as runs:
        weights = dict(runs.pull(run))
    for name, parameter in model.named_parameters():
        own = _whole(parameter) if hasattr(parameter, "to_local") else parameter
        wanted = torch.from_numpy(weights[name.removeprefix("module.").removeprefix("_orig_mod.")]).to(own.dtype)
        assert torch.equal(own.detach().cpu(), wanted), f"weights differ from the run's. parameter={name}"


def _whole(parameter: Any) -> torch.Tensor:
    """Returns what all ranks hold; `full_tensor` would read a GPU's memory on the host where gloo gathers."""
    parts: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(parts, parameter.to_local().detach().cpu())
    return torch.cat(parts)


def _fit(
    name: str,
    device: str,
    target: str,
    *,
    wrap: Callable[[Any], Any] | None = None,
    dtype: torch.dtype = torch.float32,
    **loading: Any,
) -> None:
    model = _network().to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    call = model if wrap is None else wrap(model)
    learner = attach(model, optimizer, tokens_per_step=16, target=target, run=name, learner_id="gpu", **_OPTIONS)
    for inputs, wanted in _batches(learner, device, **loading):
        nn.functional.mse_loss(call(inputs.to(dtype)), wanted.to(dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()
    _end(learner, model, name, target)


def _loader(device: str, target: str) -> None:
    """Workers that are forked at each epoch, and pinned batches."""
    _fit("loader", device, target, num_workers=2)


def _persistent(device: str, target: str) -> None:
    """Workers that stay, and pinned batches."""
    _fit("persistent", device, target, num_workers=2, persistent_workers=True)


def _compiled(device: str, target: str) -> None:
    """A model that is compiled, on a GPU with CUDA graphs."""
    _fit("compiled", device, target, wrap=lambda model: torch.compile(model, mode="reduce-overhead"))


def _bfloat16(device: str, target: str) -> None:
    """Weights in bfloat16: what a change rounds off is no work of the learner."""
    _fit("bfloat16", device, target, dtype=torch.bfloat16)


def _scaler(device: str, target: str) -> None:
    """float16 with GradScaler and a fused optimizer: a step that it skips is no step of the run."""
    model = _network().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler(device)
    learner = attach(model, optimizer, tokens_per_step=16, target=target, run="scaler", learner_id="gpu", **_OPTIONS)
    number = skipped = 0
    for number, (inputs, wanted) in enumerate(_batches(learner, device), 1):
        with torch.autocast(device, dtype=torch.float16):
            loss = nn.functional.mse_loss(model(inputs).float(), wanted)
        scaler.scale(loss * (float("inf") if number % 10 == 0 else 1.0)).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < before
        optimizer.zero_grad()
    counted = learner.stats.step_count
    assert counted == number - skipped < number, f"steps={number}, skipped={skipped}, counted={counted}"
    _end(learner, model, "scaler", target)


def _graph(device: str, target: str) -> None:
    """A whole training step as one CUDA graph, which is replayed: `step()` changes the weights in place."""
    model = _network().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
    inputs, wanted = torch.zeros(16, 32, device=device), torch.zeros(16, 8, device=device)

    def train() -> None:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.mse_loss(model(inputs), wanted).backward()
        optimizer.step()

    stream: Any = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            train()
    torch.cuda.current_stream().wait_stream(stream)
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train()
    learner = Learner(model, target=target, run="graph", learner_id="gpu", **_OPTIONS)
    for batch, aims in _batches(learner, device):
        inputs.copy_(batch)
        wanted.copy_(aims)
        graph.replay()
        learner.step(tokens=16)
    _end(learner, model, "graph", target)


def _two(device: str, target: str) -> None:
    """Two learners, each a process and a stream of its own on one device, in one run."""
    child = os.fork()  # before CUDA and threads begin
    learner_id = "second" if child == 0 else "first"
    model = _network().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    learner = attach(model, optimizer, tokens_per_step=16, target=target, run="two", learner_id=learner_id, **_OPTIONS)
    for inputs, wanted in _batches(learner, device):
        nn.functional.mse_loss(model(inputs), wanted).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert learner.leave(60.0), f"the last work was not taken. stats={learner.stats}"
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, "the second learner failed"


def _rank(number: int, count: int, run: tuple[str, str, str], port: int) -> None:
    name, device, target = run
    _tell_where_it_hangs()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    backend = "nccl" if device == "cuda" and count == 1 else "gloo"  # NCCL takes one rank a device
    if device == "cuda":
        torch.cuda.set_device(0)  # every rank's
    distributed.init_process_group(backend, rank=number, world_size=count)
    model: Any = _network().to(device)
    if name.startswith("sharded"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh(device, (count,)))
        if backend == "gloo":
            from benchmarks.gpu.gloo import GlooAllGather, GlooReduceScatter

            model.set_custom_all_gather(GlooAllGather())
            model.set_custom_reduce_scatter(GlooReduceScatter())
    else:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    learner = attach(model, optimizer, tokens_per_step=16, target=target, run=name, learner_id="gpu", **_OPTIONS)
    for inputs, wanted in _batches(learner, device):
        nn.functional.mse_loss(model(inputs), wanted).backward()
        optimizer.step()
        optimizer.zero_grad()
    _end(learner, model, name, target)
    distributed.barrier()
    distributed.destroy_process_group()


def _ranks(run: str, count: int, device: str, target: str) -> None:
    from socket import create_server

    with create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    multiprocessing.spawn(  # type: ignore[attr-defined]  # torch exports it by a star
        _rank, (count, (run, device, target), port), nprocs=count
    )


def _data_parallel(device: str, target: str) -> None:
    """Two ranks of DistributedDataParallel on one device."""
    _ranks("data-parallel", 2, device, target)


def _sharded(device: str, target: str) -> None:
    """Two ranks of `fully_shard` on one device."""
    _ranks("sharded", 2, device, target)


def _sharded_alone(device: str, target: str) -> None:
    """One rank of `fully_shard`."""
    _ranks("sharded-alone", 1, device, target)


PROGRAMS: Final = {
    "DataLoader, forked workers": _loader,
    "DataLoader, persistent workers": _persistent,
    "torch.compile, reduce-overhead": _compiled,
    "weights in bfloat16": _bfloat16,
    "GradScaler, float16": _scaler,
    "whole step as a CUDA graph": _graph,
    "two learners, one device": _two,
    "DistributedDataParallel, 2 ranks": _data_parallel,
    "fully_shard, 1 rank": _sharded_alone,
    "fully_shard, 2 ranks": _sharded,
}
_NEED_CUDA: Final = (_graph, _scaler)


def _tell_where_it_hangs() -> None:
    faulthandler.dump_traceback_later(_TIMEOUT_S - 10, exit=True)


if __name__ == "__main__":
    _tell_where_it_hangs()
    PROGRAMS[sys.argv[1]](sys.argv[2], sys.argv[3])
