"""What every call goes through, without a network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from skerry.runtime.clock import SystemClock
from skerry.v1 import exchange_pb2 as exchange
from skerry_syncer.access import limits
from skerry_syncer.access.limits import MAX_MESSAGE_BYTES
from skerry_syncer.rpc import interceptor
from skerry_syncer.rpc.interceptor import Interceptor
from skerry_syncer.run.metrics import SyncerMetrics

PULL = exchange.PullFragmentRequest(run="demo").SerializeToString()


LOST = grpc.aio.InternalError("the connection is lost")


async def refusals(
    sent: Sequence[bytes] = (PULL,),
    *,
    uris: Sequence[str] = (),
    is_silent: bool = False,
    failure: Exception | None = LOST,
    **options: Any,
) -> list[str]:
    """Returns the reasons for which a call of PullFragment is refused; no client reads its answers."""

    async def pull(_request: Any, _context: Any) -> AsyncIterator[exchange.PullFragmentResponse]:
        yield exchange.PullFragmentResponse()

    async def pull_handler(_details: Any) -> grpc.RpcMethodHandler[Any, Any]:
        parse = exchange.PullFragmentRequest.FromString
        return grpc.unary_stream_rpc_method_handler(pull, request_deserializer=parse)

    async def requests() -> AsyncIterator[bytes]:
        for data in sent:
            yield data
        if is_silent:
            await asyncio.Event().wait()

    async def write(_data: bytes) -> None:
        if failure is None:
            await asyncio.Event().wait()
        else:
            raise failure

    async def abort(*_: Any) -> None:
        pass

    metrics = SyncerMetrics(SystemClock())
    details: Any = SimpleNamespace(method="/skerry.v1.Exchange/PullFragment")
    handler: Any = await Interceptor(metrics, **options).intercept_service(pull_handler, details)
    identity = {"peer_uri": [uri.encode() for uri in uris]}
    context = SimpleNamespace(auth_context=lambda: identity, peer=lambda: "", write=write, abort=abort)
    await handler.stream_stream(requests(), context)
    samples = [sample for metric in metrics.refusals.collect() for sample in metric.samples]
    return [sample.labels["reason"] for sample in samples if sample.name.endswith("_total")]


async def test_a_client_that_vanishes_in_a_download_is_no_failure_of_the_syncer() -> None:
    assert await refusals() == []


async def test_a_call_of_grpc_that_is_wrong_is_a_failure_of_the_syncer() -> None:
    assert await refusals(failure=grpc.aio.UsageError("RPC already finished.")) == ["INTERNAL"]


@pytest.mark.parametrize(
    ("sent", "reason"),
    [([], "BAD_REQUEST"), ([b"\xff"], "BAD_REQUEST"), ([bytes(MAX_MESSAGE_BYTES + 1)], "TOO_LARGE")],
)
async def test_a_message_that_is_missing_broken_or_too_large_is_refused(sent: list[bytes], reason: str) -> None:
    assert await refusals(sent) == [reason]


async def test_a_client_that_says_nothing_or_does_not_read_is_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interceptor, "FIRST_MESSAGE_S", 0.01)
    assert await refusals([], is_silent=True) == ["TOO_SLOW"]
    monkeypatch.setattr(limits, "GRACE_S", 0.01)
    assert await refusals(failure=None) == ["TOO_SLOW"]


@pytest.mark.parametrize(
    ("uris", "reasons"),
    [
        ([], ["UNAUTHENTICATED"]),
        (["https://learner/us"], ["UNAUTHENTICATED"]),
        (["skerry://owner/us"], ["UNAUTHENTICATED"]),
        (["skerry://learner/demo/us", "skerry://admin/us"], ["UNAUTHENTICATED"]),
        (["skerry://learner/other/us"], ["PERMISSION_DENIED"]),
        (["skerry://learner/demo/us"], []),
        (["skerry://reader/prom"], []),
    ],
)
async def test_with_roles_a_caller_is_whom_its_certificate_names(uris: list[str], reasons: list[str]) -> None:
    assert await refusals(uris=uris, has_roles=True) == reasons


async def test_who_has_no_identity_is_refused_before_a_message_comes() -> None:
    assert await refusals([], is_silent=True, has_roles=True) == ["UNAUTHENTICATED"]
