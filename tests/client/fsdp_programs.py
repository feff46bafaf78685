"""What the ranks of an island with `fully_shard` do in the tests."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from skerry.client import Learner
from tests.client.ddp_programs import learner_of
from tests.client.ranks import Rank, loss_of, network

TURN_COUNT = 2
Weights = dict[str, np.ndarray[Any, Any]]


def sharded(model: Any, shape: tuple[int, ...]) -> Any:
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
    rank: Rank, shape: tuple[int, ...], options: dict[str, Any], turns: Turns | None = None
) -> tuple[Weights, Weights]:
    """Trains `TURN_COUNT` times 3 steps, each time until the work is merged and adopted.

    Returns the weights after joining, and those at the end.
    """
    number = turns.number if turns else 0
    model: Any = network()
    if shape:
        sharded(model, shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if shape:
        with torch.no_grad():  # leaves weights gathered
            loss_of(model, 0, rank.number, rank.count)
    with learner_of(model, rank, **options) as learner:
        began = weights_of(model)
        for turn in range(TURN_COUNT):
            if turns:
                turns.wait(turn)
                _exchange_all(learner, rank)
            for step in range(3):
                _train(model, optimizer, 100 * number + 10 * turn + step, rank if shape else Rank(0, 1, ""))
                learner.step(tokens=24 // rank.count)
            _exchange_all(learner, rank)
            if turns and rank.number == 0:
                turns.end(turn)
        ended = weights_of(model)
        if turns:
            turns.wait_all(TURN_COUNT)  # since the others' rounds count who is there
        return began, ended


def _train(model: Any, optimizer: torch.optim.Optimizer, step: int, rank: Rank) -> None:
    optimizer.zero_grad()
    loss_of(model, step, rank.number, rank.count).backward()
    optimizer.step()
    with torch.no_grad():
        loss_of(model, step, rank.number, rank.count)  # leaves gathered weights in the place of the shards


def _exchange_all(learner: Learner, rank: Rank) -> None:
    """Sends what is unsent, and adopts the newest version: what the second flush sends follows that."""
    for _ in range(2):
        learner.step(tokens=24 // rank.count)
        assert learner.flush(60.0, is_last=True)


@dataclass(frozen=True)
class Turns:
    """Learners that train one after another; a file says that one has ended a turn."""

    number: int
    count: int
    folder: Path

    def wait(self, turn: int) -> None:
        """Waits until the learner before has ended its turn."""
        before = turn * self.count + self.number - 1
        while before >= 0 and not (self.folder / str(before)).exists():
            time.sleep(0.01)

    def wait_all(self, turn_count: int) -> None:
        """Waits until the last learner has ended its last turn."""
        replace(self, number=0).wait(turn_count)

    def end(self, turn: int) -> None:
        """Ends this learner's turn."""
        (self.folder / str(turn * self.count + self.number)).touch()


def join_with_tensor_parallelism(rank: Rank) -> None:
    """Attaches a model whose rows are cut by tensor parallelism, and again by fully_shard."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = network()
    parallelize_module(model, mesh["tensor"], {"1": ColwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    learner_of(model, rank)
