"""What `fully_shard` calls between ranks that share one GPU.

NCCL takes one rank a device. Gloo moves CUDA tensors by way of the host in `all_gather` of lists and in `all_reduce`;
its operations on whole tensors, which `fully_shard` calls by default, read a GPU's memory on the host and end the
process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter


class _Allocating:
    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns memory for one call."""
        return torch.empty(*size, dtype=dtype, device=device)


class GlooAllGather(_Allocating, AllGather):
    """Gathers into the pieces of the output."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: distributed.ProcessGroup,
        async_op: bool = False,  # noqa: FBT001, FBT002 - the interface's
    ) -> None:
        """Returns when the output is whole."""
        distributed.all_gather(list(output_tensor.chunk(group.size())), input_tensor.clone(), group=group)


class GlooReduceScatter(_Allocating, ReduceScatter):
    """Adds up all of it at every rank, and keeps the rank's own piece."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: distributed.ProcessGroup,
        op: Any,
        async_op: bool = False,  # noqa: FBT001, FBT002 - the interface's
    ) -> None:
        """Returns when the output is there."""
        distributed.all_reduce(input_tensor, distributed.ReduceOp.SUM, group=group)
        own = input_tensor.chunk(group.size())[group.rank()]
        output_tensor.copy_(own / group.size() if op == distributed.ReduceOp.AVG else own)
