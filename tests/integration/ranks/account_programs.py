"""What the ranks of an island do that is killed and goes on from its own checkpoint."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from skerry import Learner
from tests.integration.ranks.ddp_programs import learner_of
from tests.integration.ranks.fsdp_programs import Layout, Weights, sharded
from tests.integration.ranks.fsdp_programs import weights_of as whole_weights_of
from tests.integration.ranks.ranks import Rank, loss_of, network


def _trained(rank: Rank, layout: Layout) -> Any:
    if layout.shape:
        return sharded(network(), layout)
    return nn.parallel.DistributedDataParallel(network()) if rank.count > 1 else network()


def weights_of(model: Any) -> Weights:
    """Returns the whole weights by their own names; every rank must ask."""
    return whole_weights_of(model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model)


def _train(model: Any, learner: Learner, rank: Rank, step_count: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(step_count):
        optimizer.zero_grad()
        loss_of(model, step, rank.number, rank.count).backward()
        optimizer.step()
        learner.step(tokens=24 // rank.count)


def save_and_be_killed(rank: Rank, layout: Layout, folder: Path, options: dict[str, Any]) -> None:
    """Trains until a delta was sent and some steps more, saves what each rank has, and dies."""
    model = _trained(rank, layout)
    with learner_of(model, rank, **options) as learner:
        _train(model, learner, rank, 3)
        while learner.stats.deltas_acknowledged == 0:
            _train(model, learner, rank, 1)
        _train(model, learner, rank, 2)
        torch.save(learner.state_dict(), folder / f"state-{rank.number}")
        torch.save((weights_of(model), learner.stats.step_count), folder / f"weights-{rank.number}")
        distributed.barrier()
        os.kill(os.getpid(), signal.SIGKILL)


def go_on(
    rank: Rank, layout: Layout, folder: Path, options: dict[str, Any], more: dict[str, Any]
) -> tuple[Weights, int, Weights, Weights]:
    """Goes on from the states in `folder`, but the one that is `left_out`; each rank reads some.

    Waits for `leave_s` until the work is merged. Returns the weights, the step, the weights after two steps more, and
    those that it leaves with.
    """
    paths = [path for path in sorted(folder.glob("state-*")) if path.name != more.get("left_out")]
    model = _trained(rank, layout)
    with learner_of(model, rank, **options) as learner:
        learner.load_state_dict([torch.load(path, weights_only=True) for path in paths[rank.number :: rank.count]])
        began, step_count = weights_of(model), learner.stats.step_count
        _train(model, learner, rank, 2)
        ended = weights_of(model)
        learner.leave(more.get("leave_s", 30.0), load_merged=True)
    return began, step_count, ended, weights_of(model)


def count_on(rank: Rank) -> tuple[int, int, int | None]:
    """Takes a step after those of an earlier process; returns the counts of both, and what it saves after leaving."""
    model = _trained(rank, Layout())
    with learner_of(model, rank) as learner:
        learner.count_from(7, 70)
        learner.step(tokens=5)
    return learner.stats.step_count, learner.stats.token_count, learner.state_dict().get("step_count")
