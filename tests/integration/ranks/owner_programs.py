"""What ranks do in the tests of fragments that each have one rank that exchanges them."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
from torch import nn

from skerry.model.torch.shards import local_part, region_of
from skerry.net.grpc_transport import GrpcTransport
from skerry.v1 import exchange_pb2 as v1
from tests.integration.ranks.ddp_programs import learner_of
from tests.integration.ranks.fsdp_programs import Layout, Weights, sharded, weights_of
from tests.integration.ranks.ranks import Rank, network

DELTA_COUNT = 3


# The parts of deltas that one rank has sent, by fragment: first element, and digest of the bytes.
Sent: TypeAlias = dict[str, set[tuple[int, str]]]


@dataclass(frozen=True)
class Faults:
    """What goes wrong at one rank."""

    rank: int
    dies_pushing: bool = False
    is_cut_off: bool = False


def send_changes(
    rank: Rank, layout: Layout, options: dict[str, Any], faults: Faults | None = None
) -> tuple[Sent, Weights, Any]:
    """Changes weights once and sends the change, and then `DELTA_COUNT` - 1 times what the quantiser has left of it.

    The change is the same whoever holds which part. Returns what was sent, the run's weights at the end and `stats`.
    """
    sent: Sent = {}
    own, faulty = GrpcTransport.push_delta, faults if faults and faults.rank == rank.number else None

    async def push_delta(self: GrpcTransport, requests: AsyncIterator[v1.PushDeltaRequest]) -> v1.PushDeltaResponse:
        async def noted() -> AsyncIterator[v1.PushDeltaRequest]:
            header, part, data = v1.PushHeader(), v1.PartBegin(), b""
            async for request in requests:
                if request.HasField("header"):
                    header = request.header
                if request.HasField("part"):
                    part, data = request.part, b""
                data += request.data
                yield request
                if header.base_version >= 0 and request.HasField("part_end"):
                    digest = hashlib.sha256(data).hexdigest()
                    sent.setdefault(header.fragment, set()).add((part.first, digest))
                    if faulty and faulty.dies_pushing:
                        os.kill(os.getpid(), signal.SIGKILL)

        return await own(self, noted())

    target = "127.0.0.1:1" if faulty and faulty.is_cut_off else rank.target
    model: Any = network(width=120)
    if layout.shape:
        sharded(model, layout)
    with patch.object(GrpcTransport, "push_delta", push_delta):
        learner = learner_of(model, Rank(rank.number, rank.count, target), fragment_count=4, **options)
        _change(model)
        for _ in range(DELTA_COUNT):
            learner.step(tokens=24 // rank.count)
            assert learner.flush(60.0)
        stats = learner.stats
        assert learner.leave(60.0, load_merged=True)
    return sent, weights_of(model), stats


def _change(model: nn.Module) -> None:
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            places = torch.arange(tensor.numel(), dtype=torch.float64).view(tensor.shape)
            change = (0.01 * torch.sin(places + len(name))).float()
            local_part(tensor).add_(change[region_of(name, tensor).slices])


def spoil(rank: Rank, layout: Layout, options: dict[str, Any]) -> list[Weights]:
    """Makes weights of each fragment infinite, as gradients would; returns the weights after steps that changed any."""
    model: Any = sharded(network(), layout)
    seen = []
    with learner_of(model, rank, fragment_count=2, **options) as learner:
        seen.append(weights_of(model))
        with torch.no_grad():
            for tensor in model.parameters():
                local_part(tensor).fill_(torch.inf)
        while not learner.stats.deltas_acknowledged:
            if learner.step(tokens=8):
                seen.append(weights_of(model))
    return seen


def train_until_stopped(rank: Rank, layout: Layout, options: dict[str, Any]) -> str:
    """Trains until the exchange has stopped; returns why."""
    model: Any = sharded(network(), layout)
    with learner_of(model, rank, **options) as learner:
        while learner.failure is None:
            learner.step(tokens=8)
        learner.step(tokens=8)
        return learner.failure.reason
