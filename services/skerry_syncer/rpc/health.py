"""The `grpc.health.v1` service.

Watches of the stock servicer of grpcio-health-checking hold a server open until the end of its grace.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # its package has no types
    """Says of each service that it serves until `is_draining` is set; `has_ended` ends every watch."""

    def __init__(self, services: Collection[str]) -> None:
        """Says that these serve."""
        self.is_draining = asyncio.Event()
        self.has_ended = asyncio.Event()
        self._services = services

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> HealthCheckResponse:
        """Answers with the status now."""
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return self._status(request)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> AsyncIterator[HealthCheckResponse]:
        """Answers with the status now, and then with its change."""
        yield (first := self._status(request))
        await self.is_draining.wait()
        if self._status(request) != first:
            yield self._status(request)
        await self.has_ended.wait()

    def _status(self, request: health_pb2.HealthCheckRequest) -> HealthCheckResponse:
        if request.service not in self._services:
            return HealthCheckResponse(status=HealthCheckResponse.SERVICE_UNKNOWN)
        is_draining = self.is_draining.is_set()
        return HealthCheckResponse(
            status=HealthCheckResponse.NOT_SERVING if is_draining else HealthCheckResponse.SERVING
        )
