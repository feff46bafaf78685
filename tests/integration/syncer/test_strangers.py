"""What a client may take before the syncer knows who it is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from skerry.v1 import capabilities_pb2
from skerry_syncer.rpc import interceptor
from tests.attacks.target import Target
from tests.attacks.wire import Unfinished
from tests.support.raw_learner import Stubs, connected, refused
from tests.support.serve_process import ServeProcess, serve_process


def peak_mib(serve: ServeProcess) -> float:
    """Returns the most memory that the process ever had."""
    (line,) = [one for one in Path(f"/proc/{serve.pid}/status").read_text().splitlines() if one.startswith("VmHWM")]
    return int(line.split()[1]) / 2**10


async def test_messages_that_grpc_compressed_are_refused_and_not_inflated(store_url: str, tmp_path: Path) -> None:
    async with serve_process(store_url, tmp_path) as serve, connected(serve.port) as stubs:
        before = peak_mib(serve)
        for method in ("/skerry.v1.Runs/GetRun", "/grpc.health.v1.Health/Check"):
            call = stubs.channel.unary_unary(method, None, None)(bytes(2**28), compression=grpc.Compression.Gzip)
            assert await call.code() == grpc.StatusCode.UNIMPLEMENTED
        assert peak_mib(serve) - before < 32


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


async def test_messages_that_never_end_take_little_memory(store_url: str, tmp_path: Path) -> None:
    async with serve_process(store_url, tmp_path) as serve, connected(serve.port) as stubs:
        before = peak_mib(serve)
        connection = Unfinished(Target(serve.port), "/skerry.v1.Runs/CreateRun", call_count=60, size_bytes=8_000_000)
        attacking = asyncio.create_task(connection.attack())
        last = -1
        while connection.sent_bytes > last:
            last = connection.sent_bytes
            await asyncio.wait([attacking], timeout=1)
        assert 2**23 < last < 250 * 2**20
        assert peak_mib(serve) - before < 300
        await stubs.capabilities.GetCapabilities(capabilities_pb2.GetCapabilitiesRequest(), timeout=10)
        attacking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await attacking


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
