"""`grpc.health.v1` of a real server: what clients that choose among replicas go by."""

from __future__ import annotations

import asyncio

from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckResponse

from skerry_syncer.server import SyncerServer
from tests.support.raw_learner import connected

GRACE_S = 8.0


async def test_who_watches_hears_of_the_drain_though_another_one_left_and_the_server_does_not_wait_for_it(
    server: SyncerServer,
) -> None:
    async with connected(server.port) as one, connected(server.port) as other:
        stays, leaves = [
            health_pb2_grpc.HealthStub(stubs.channel).Watch(health_pb2.HealthCheckRequest()) for stubs in (one, other)
        ]
        assert (await stays.read()).status == HealthCheckResponse.SERVING
        assert (await leaves.read()).status == HealthCheckResponse.SERVING
        leaves.cancel()
        # By the time that this is answered, the server knows that the watch is cancelled.
        await health_pb2_grpc.HealthStub(other.channel).Check(health_pb2.HealthCheckRequest())
        async with asyncio.timeout(GRACE_S / 2):
            draining = asyncio.create_task(server.drain(GRACE_S))
            assert (await stays.read()).status == HealthCheckResponse.NOT_SERVING
            await draining
