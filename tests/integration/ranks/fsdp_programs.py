"""What the ranks of an island with `fully_shard` do in the tests."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from skerry import Learner, attach
from tests.integration.ranks.ddp_programs import learner_of
from tests.integration.ranks.ranks import Rank, loss_of, network

TURN_COUNT = 2
Weights = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Layout:
    """How the ranks of an island hold a model: each all of it, or shards over a mesh."""

    shape: tuple[int, ...] = ()  # (shards,) or (replicas, shards), and the ranks of tensor parallelism if there are any
    is_tensor_parallel: bool = False

    @property
    def rank_count(self) -> int:
        """How many ranks there are."""
        return math.prod(self.shape)

    @property
    def tensor_count(self) -> int:
        """How many ranks share each layer, and so read the same part."""
        return self.shape[-1] if self.is_tensor_parallel else 1


ALONE = Layout()
TENSOR_PARALLEL = Layout((2, 2), is_tensor_parallel=True)


def sharded(model: Any, layout: Layout, **options: Any) -> Any:
    """Returns the model cut into shards, of which some are larger than others, and some are empty.

    Tensor parallelism cuts one layer by columns, and another one by rows, which `fully_shard` then cuts again. Without
    tensor parallelism one matrix is cut by columns.
    """
    data_names = ("replicas", "shards")[layout.is_tensor_parallel - len(layout.shape) :]
    names = (*data_names, "tensor") if layout.is_tensor_parallel else data_names
    mesh = init_device_mesh("cpu", layout.shape, mesh_dim_names=names)
    by_columns: Any = lambda one: Shard(1) if one.ndim == 2 else None  # noqa: E731 - a rule of one line
    if layout.is_tensor_parallel:
        plan = {
            "1": RowwiseParallel(input_layouts=Replicate()),
            "4": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(model, mesh["tensor"], plan)
        mesh, by_columns = mesh[data_names], None
    fully_shard(model[1], mesh=mesh, shard_placement_fn=by_columns, **options)
    return fully_shard(model, mesh=mesh, **options)


def weights_of(model: nn.Module) -> Weights:
    """Returns the whole weights; every rank must ask."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            # A pass may have left its gathered weights, in the type that it computes in.
            module.reshard()  # type: ignore[operator]
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().float().numpy().copy()
        for name, tensor in getattr(model, "module", model).named_parameters()
    }


def train_in_turns(rank: Rank, layout: Layout, options: dict[str, Any]) -> tuple[Weights, Weights, Weights]:
    """Trains `TURN_COUNT` times 3 steps, each time until the work is merged and adopted.

    Returns the weights after joining, what `merged_weights` gives at the end, and the run's weights after leaving.
    """
    model = distributed_model(rank, layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():  # leaves weights gathered
        loss_of(model, 0)
    with learner_of(model, rank, **options) as learner:
        began = weights_of(model)
        for turn in range(TURN_COUNT):
            for step in range(3):
                _train(model, optimizer, 10 * turn + step, rank, layout)
                learner.step(tokens=24 // rank.count)
            for _ in range(2):  # sends what is unsent, and adopts the newest version: what the second sends follows it
                learner.step(tokens=24 // rank.count)
                assert learner.flush(60.0, is_last=True)
        merged = learner.merged_weights()
        assert learner.leave(60.0, load_merged=True)
    return began, merged, weights_of(model)


def distributed_model(rank: Rank, layout: Layout) -> Any:
    """Returns a model of which the ranks of an island hold shards, or each all of it."""
    model = network()
    if layout.shape:
        return sharded(model, layout)
    return nn.parallel.DistributedDataParallel(model) if rank.count > 1 else model


def _train(model: Any, optimizer: torch.optim.Optimizer, step: int, rank: Rank, layout: Layout) -> None:
    """Trains one step; with shards, on two micro-batches whose gradients are accumulated."""
    micro_count = 2 if layout.shape else 1
    parts = micro_count * (rank.count // layout.tensor_count)
    first = micro_count * (rank.number // layout.tensor_count)
    optimizer.zero_grad()
    for micro in range(micro_count):
        if layout.shape:
            model.set_requires_gradient_sync(micro == micro_count - 1)
        (loss_of(model, step, first + micro, parts) / micro_count).backward()
    optimizer.step()
    with torch.no_grad():
        loss_of(model, step)  # leaves gathered weights in the place of the shards


def train_until_version(rank: Rank, layout: Layout, version: int) -> dict[str, Any]:
    """Trains in bfloat16, with a frozen bias, until every fragment has a version.

    Returns the weights at the start and the end, and the digests of all weights after every step that changed some.
    """
    model: Any = network()
    model[1].bias.requires_grad_(False)
    sharded(model, layout, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.01)
    adopted, step_count = [], 0
    with learner_of(model, rank) as learner:
        began = weights_of(model)
        while min(learner.stats.versions.values()) < version:
            _train(model, optimizer, step_count, rank, layout)
            step_count += 1
            if changed := learner.step(tokens=10):
                adopted.append((changed, weights_digest(weights_of(model))))
    return {"began": began, "adopted": adopted, "ended": weights_of(model), "failure": learner.failure}


def weights_digest(weights: Weights) -> str:
    """Returns the digest of whole weights."""
    return hashlib.sha256(b"".join(one.tobytes() for one in weights.values())).hexdigest()


def join_with_frozen(rank: Rank, layout: Layout, seeds: Sequence[int], allow_other: Sequence[str] = ()) -> None:
    """Joins with two frozen layers, of which each rank has cut its shards from values of its own seed."""
    model: Any = network()
    for number in (1, 4):
        other: Any = network(seeds[rank.number])
        model[number] = other[number].requires_grad_(False)
    if layout.shape:
        sharded(model, layout)
    learner_of(model, rank, allow_other_frozen=allow_other).close()


def close_after_the_groups(rank: Rank, layout: Layout) -> None:
    """Closes the learner when the program has destroyed all process groups, as in a `finally` before it."""
    learner = Learner(sharded(network(), layout), target=rank.target, run="late", learner_id="late", create=True)
    distributed.barrier()
    distributed.destroy_process_group()
    learner.close()


def drift(rank: Rank, layout: Layout) -> None:
    """Trains; the last rank's copy of a norm, which is no part of a layer that is cut, changes in another way."""
    model = sharded(network(), layout)
    with learner_of(model, rank) as learner:
        for _ in range(10_000):
            time.sleep(0.002)  # a failure may have to wait for the next adoption
            with torch.no_grad():
                for one in model.parameters():
                    one.to_local().add_(0.01)
                model[2].weight.to_local().add_(0.01 * (rank.number == rank.count - 1))
            learner.step(tokens=5)


def join_with_interleaved_rows(rank: Rank) -> None:
    """Attaches a matrix of which the first rank holds the rows 0 and 2, the second one 1 and 3."""
    mesh = init_device_mesh("cpu", (2,))
    rows = distribute_tensor(torch.ones(4, 2), mesh, [_StridedShard(0, split_factor=2)])
    learner_of({"rows": rows}, rank)  # type: ignore[arg-type]  # tensors by name


def attach_fsdp1(rank: Rank) -> None:
    """Attaches a model of which a part is in FSDP1's own form."""
    shard = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    model = nn.Sequential(nn.Linear(4, 4), shard)
    attach(
        model, torch.optim.SGD(model.parameters()), tokens_per_step=1, target=rank.target, run="theirs",
        learner_id="island", create=True,
    )  # fmt: skip
