"""What a client may take before the syncer knows who it is."""

from __future__ import annotations

from pathlib import Path

import grpc

from tests.syncer.raw_learner import connected
from tests.syncer.serve_process import ServeProcess, serve_process


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
