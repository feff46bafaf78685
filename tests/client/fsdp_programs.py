"""What the ranks of an island with `fully_shard` do in the tests."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.client.ddp_programs import learner_of
from tests.client.ranks import Rank, loss_of, network

Weights = dict[str, np.ndarray[Any, Any]]


def sharded(model: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """Returns the model cut into shards: one matrix by columns, the rest by rows, which are too few for all ranks."""
    names = ("replicas", "shards")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    fully_shard(model[1], mesh=mesh, shard_placement_fn=lambda one: Shard(1) if one.ndim == 2 else None)
    return fully_shard(model, mesh=mesh)


def weights_of(model: nn.Module) -> Weights:
    """Returns the whole weights; every rank must ask."""
    return {
        name: (one.full_tensor() if isinstance(one, DTensor) else one).detach().numpy().copy()
        for name, one in model.named_parameters()
    }


def train_in_turns(
    rank: Rank, shape: tuple[int, ...], options: dict[str, Any], *, data: int = 0, barrier: str = ""
) -> tuple[Weights, Weights]:
    """Trains 3 times 3 steps, each time until the work is merged and adopted.

    Returns the weights after joining, and those at the end.
    """
    model: Any = network(data)
    if shape:
        sharded(model, shape)
    part, parts = (rank.number, rank.count) if shape else (0, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = 1000 * data
    with learner_of(model, rank, **options) as learner:
        began = weights_of(model)
        if barrier:
            _wait_for_all(Path(barrier), options["learner_id"])
        for _ in range(3):
            for _ in range(3):
                step += 1
                optimizer.zero_grad()
                loss_of(model, step, part, parts).backward()
                optimizer.step()
                with torch.no_grad():
                    loss_of(model, step, part, parts)  # leaves gathered weights in the place of the shards
                learner.step(tokens=24 // parts)
            for _ in range(2):  # the second is acknowledged once the version of the first is adopted
                learner.step(tokens=24 // parts)
                assert learner.flush(60.0, is_last=True)
        return began, weights_of(model)


def _wait_for_all(folder: Path, name: str) -> None:
    (folder / name).touch()
    expected = int(folder.name)
    while len(list(folder.iterdir())) < expected:
        time.sleep(0.01)


def join_with_tensor_parallelism(rank: Rank) -> None:
    """Attaches a model whose rows are cut by tensor parallelism, and again by fully_shard."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = network()
    parallelize_module(model, mesh["tensor"], {"1": ColwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    learner_of(model, rank)
