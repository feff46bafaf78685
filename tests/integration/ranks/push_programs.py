"""What ranks do in the tests of deltas that all of them push."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from skerry import array_learner
from skerry import learner as torch_learner
from skerry.errors import error_of
from skerry.model.torch.shards import local_part, region_of
from skerry.net.grpc_transport import GrpcTransport
from skerry.v1 import exchange_pb2 as v1
from tests.integration.ranks.ddp_programs import learner_of
from tests.integration.ranks.fsdp_programs import Layout, Weights, sharded, weights_of
from tests.integration.ranks.ranks import Rank, network

WIDTH = 128
DELTA_COUNT = 3


@dataclass
class Sent:
    """What one rank has sent in pushes of deltas, of initial weights apart."""

    parts: list[tuple[str, str, int, int, str]] = field(default_factory=list)  # with delta id, and digest of the bytes
    completed: list[tuple[str, bytes]] = field(default_factory=list)  # fragments with the digests of deltas
    bytes_by_delta: dict[str, int] = field(default_factory=dict)
    push_count: int = 0


@dataclass(frozen=True)
class Faults:
    """What goes wrong in the pushes of one rank."""

    rank: int = -1
    cut_after: int = -1  # messages of its first push
    is_killed: bool = False  # instead of being cut
    target: str = ""  # where the rank calls, if not the syncer


class RecordingTransport(GrpcTransport):
    """Notes what is pushed, and fails once by `faults`."""

    sent = Sent()
    faults = Faults()

    async def push_delta(self, requests: AsyncIterator[v1.PushDeltaRequest]) -> v1.PushDeltaResponse:
        """Pushes, or breaks off."""
        sent, faults = self.sent, self.faults
        is_failing = False

        async def noted() -> AsyncIterator[v1.PushDeltaRequest]:
            nonlocal is_failing
            header, part, data = v1.PushHeader(), v1.PartBegin(), b""
            count = 0
            async for request in requests:
                if request.HasField("header"):
                    header = request.header
                    sent.push_count += header.base_version >= 0
                    is_failing = faults.cut_after >= 0 and header.base_version >= 0 and sent.push_count == 1
                if is_failing and count == faults.cut_after:
                    if faults.is_killed:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return
                count += 1
                if header.base_version >= 0:
                    if request.HasField("part"):
                        part, data = request.part, b""
                    data += request.data
                    if request.HasField("part_end"):
                        digest = hashlib.sha256(data).hexdigest()
                        sent.parts.append((header.fragment, header.delta_id, part.first, part.numel, digest))
                        size_bytes = sent.bytes_by_delta.get(header.delta_id, 0) + len(data)
                        sent.bytes_by_delta[header.delta_id] = size_bytes
                    if request.HasField("complete"):
                        sent.completed.append((header.fragment, request.complete.digest))
                yield request

        response = await super().push_delta(noted())
        if is_failing:
            raise error_of("UNREACHABLE", "push was cut")
        return response


def send_changes(
    rank: Rank, layout: Layout, options: dict[str, Any], faults: Faults | None = None
) -> tuple[Sent, Weights, Any]:
    """Changes weights once and sends the change, and then `DELTA_COUNT` - 1 times what the quantiser has left of it.

    The change is the same whoever holds which part. Returns what was sent, the run's weights at the end and `stats`.
    """
    if faults is not None and faults.rank == rank.number:
        RecordingTransport.faults = faults
        if faults.target:
            rank = Rank(rank.number, rank.count, faults.target)
    model: Any = network(width=WIDTH)
    if layout.shape:
        sharded(model, layout)
    with ExitStack() as stack:
        for module in (array_learner, torch_learner):
            stack.enter_context(patch.object(module, "GrpcTransport", RecordingTransport))
        learner = stack.enter_context(learner_of(model, rank, fragment_count=2, **options))
        _change(model)
        for _ in range(DELTA_COUNT):
            learner.step(tokens=24 // rank.count)
            assert learner.flush(60.0, is_last=True)
        stats = learner.stats
        assert learner.leave(60.0, load_merged=True)
    return RecordingTransport.sent, weights_of(model), stats


def _change(model: nn.Module) -> None:
    with torch.no_grad():
        for name, one in model.named_parameters():
            places = torch.arange(one.numel(), dtype=torch.float64).view(one.shape)
            change = (0.01 * torch.sin(places + len(name))).float()
            local_part(one).add_(change[region_of(name, one).slices])


def spoil(rank: Rank, layout: Layout, options: dict[str, Any]) -> tuple[Weights, Weights]:
    """Makes one weight of the last rank infinite; returns the weights at the start, and when the delta was given up."""
    model: Any = sharded(network(width=WIDTH), layout)
    with learner_of(model, rank, **options) as learner:
        began = weights_of(model)
        if rank.number == rank.count - 1:
            with torch.no_grad():
                local_part(model[1].weight).view(-1)[-1] = torch.inf
        learner.step(tokens=8)
        while not learner.stats.deltas_acknowledged:
            learner.flush(1.0)
            learner.step(tokens=8)
        return began, weights_of(model)
