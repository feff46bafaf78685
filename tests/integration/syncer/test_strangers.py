"""What a client may take before the syncer knows who it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from skerry_syncer.rpc import interceptor
from tests.support.raw_learner import Stubs, connected, refused
from tests.support.serve_process import serve_process


async def test_messages_that_grpc_compressed_are_refused_and_not_inflated(store_url: str, tmp_path: Path) -> None:
    async with serve_process(store_url, tmp_path) as serve, connected(serve.port) as stubs:
        before = serve.peak_mib()
        for method in ("/skerry.v1.Runs/GetRun", "/grpc.health.v1.Health/Check"):
            call = stubs.channel.unary_unary(method, None, None)(bytes(2**28), compression=grpc.Compression.Gzip)
            assert await call.code() == grpc.StatusCode.UNIMPLEMENTED
        assert serve.peak_mib() - before < 32


async def _nothing() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


def _silent(stubs: Stubs, method: str) -> Any:
    """Returns a call that never says anything."""
    return stubs.channel.stream_unary(method, None, None)(_nothing())


@pytest.mark.parametrize("method", ["Runs/GetRun", "Exchange/PullFragment", "Exchange/Attach", "Exchange/PushDelta"])
async def test_a_call_whose_first_message_does_not_come_is_ended(
    method: str, stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interceptor, "FIRST_MESSAGE_S", 0.3)
    async with asyncio.timeout(10):
        with refused("TOO_SLOW", grpc.StatusCode.RESOURCE_EXHAUSTED) as caught:
            await _silent(stubs, f"/skerry.v1.{method}")
    assert caught.refusal.retry_after_s


GARBAGE = b"\xff\xff\xff\xff"
FOREIGN = [
    "grpc.health.v1.Health/Check",
    "grpc.health.v1.Health/Watch",
    "grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
]


@pytest.mark.parametrize("method", FOREIGN)
async def test_health_and_reflection_refuse_garbage_and_large_messages(method: str, stubs: Stubs) -> None:
    call = stubs.channel.stream_unary(f"/{method}", None, None)
    with refused("BAD_REQUEST", grpc.StatusCode.INVALID_ARGUMENT):
        await call(iter([GARBAGE]), timeout=10)
    with refused("TOO_LARGE", grpc.StatusCode.RESOURCE_EXHAUSTED):
        await call(iter([bytes(5 * 2**20)]), timeout=10)
