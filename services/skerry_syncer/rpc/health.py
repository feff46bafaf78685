"""The `grpc.health.v1` service.

The stock servicer of grpcio-health-checking forgets all watchers of a service when one of them leaves, and its watches
hold a server open until the end of its grace.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # its package has no types
    """Says of each service whether it serves; clients that watch hear of each change."""

    def __init__(self) -> None:
        """Knows no service yet."""
        self._statuses: dict[str, HealthCheckResponse.ServingStatus.ValueType] = {}
        self._watches: dict[asyncio.Event, None] = {}
        self._is_draining = False
        self._has_ended = False

    def set(self, service: str, status: HealthCheckResponse.ServingStatus.ValueType) -> None:
        """Sets a service's status, for good once the server drains."""
        if not self._is_draining:
            self._statuses[service] = status
            self._wake()

    def drain(self) -> None:
        """Sets every service to NOT_SERVING for good."""
        for service in self._statuses:
            self.set(service, HealthCheckResponse.NOT_SERVING)
        self._is_draining = True

    def end(self) -> None:
        """Ends every watch, so that the server does not wait for its watchers when it stops."""
        self._has_ended = True
        self._wake()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> HealthCheckResponse:
        """Answers with the status now."""
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return HealthCheckResponse(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> AsyncIterator[HealthCheckResponse]:
        """Answers with the status now, and then with each change."""
        changed = asyncio.Event()
        self._watches[changed] = None
        last = None
        try:
            while True:
                changed.clear()
                status = self._statuses.get(request.service, HealthCheckResponse.SERVICE_UNKNOWN)
                if status != last:
                    yield HealthCheckResponse(status=status)
                    last = status
                elif self._has_ended:
                    return
                else:
                    await changed.wait()
        finally:
            del self._watches[changed]

    def _wake(self) -> None:
        for changed in self._watches:
            changed.set()
