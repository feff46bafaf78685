"""What every call goes through, without a network."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc

from skerry.runtime.clock import SystemClock
from skerry.v1 import exchange_pb2 as exchange
from skerry_syncer.rpc.interceptor import Interceptor
from skerry_syncer.run.metrics import SyncerMetrics


async def test_a_client_that_vanishes_in_a_download_is_no_failure_of_the_syncer() -> None:
    async def pull(_request: Any, _context: Any) -> AsyncIterator[exchange.PullFragmentResponse]:
        yield exchange.PullFragmentResponse()

    async def found(_details: Any) -> grpc.RpcMethodHandler[Any, Any]:
        parse = exchange.PullFragmentRequest.FromString
        return grpc.unary_stream_rpc_method_handler(pull, request_deserializer=parse)

    async def requests() -> AsyncIterator[bytes]:
        yield exchange.PullFragmentRequest().SerializeToString()

    async def write(_data: bytes) -> None:
        raise grpc.aio.InternalError("the connection is lost")

    metrics = SyncerMetrics(SystemClock())
    details: Any = SimpleNamespace(method="/skerry.v1.Exchange/PullFragment")
    handler: Any = await Interceptor(metrics).intercept_service(found, details)
    await handler.stream_stream(requests(), SimpleNamespace(auth_context=dict, peer=lambda: "", write=write))
    assert [sample for metric in metrics.refusals.collect() for sample in metric.samples] == []
