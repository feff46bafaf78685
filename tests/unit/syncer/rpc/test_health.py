"""What a client hears that watches a syncer's health."""

from __future__ import annotations

from typing import Any

from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2 import HealthCheckResponse

from skerry_syncer.rpc.health import HealthServicer


async def test_a_watcher_that_reads_slowly_hears_the_last_status_before_its_watch_ends() -> None:
    servicer = HealthServicer([""])
    context: Any = None
    watch = servicer.Watch(health_pb2.HealthCheckRequest(), context)
    assert (await anext(watch)).status == HealthCheckResponse.SERVING
    servicer.is_draining.set()
    servicer.has_ended.set()
    assert [answer.status async for answer in watch] == [HealthCheckResponse.NOT_SERVING]


async def test_a_service_that_is_not_there_is_watched_as_unknown() -> None:
    context: Any = None
    watch = HealthServicer(["a"]).Watch(health_pb2.HealthCheckRequest(service="b"), context)
    assert (await anext(watch)).status == HealthCheckResponse.SERVICE_UNKNOWN
