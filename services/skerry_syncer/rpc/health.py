"""The `grpc.health.v1` service.

The stock servicer of grpcio-health-checking forgets all watchers of a service when one of them leaves, and its watches
hold a server open until the end of its grace.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # its package has no types
    """Says of each service whether it serves; clients that watch hear of each change."""

    def __init__(self, services: Iterable[str]) -> None:
        """Says that these serve."""
        self._statuses = dict.fromkeys(services, HealthCheckResponse.SERVING)
        self._changed = asyncio.Event()  # replaced by another one at each change
        self._has_ended = False

    def drain(self) -> None:
        """Sets every service to NOT_SERVING for good."""
        self._statuses = dict.fromkeys(self._statuses, HealthCheckResponse.NOT_SERVING)
        self._wake()

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
        last = None
        while True:
            changed, has_ended = self._changed, self._has_ended  # before the status, so that the last one is sent
            status = self._statuses.get(request.service, HealthCheckResponse.SERVICE_UNKNOWN)
            if status != last:
                yield HealthCheckResponse(status=status)
            last = status
            if has_ended:
                return
            await changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
