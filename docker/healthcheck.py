"""Exits with 0 if the syncer in this container answers SERVING to `grpc.health.v1`, else with 1 and a reason.

The port is that of SKERRY_LISTEN, the server's own setting. With SKERRY_TLS_CA it connects as commands in the container
do: with TLS, and with the client certificate of SKERRY_TLS_CERT and SKERRY_TLS_KEY.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

# Shorter than the health check's timeout in the Dockerfile, so that the reason is printed before the probe is killed.
_TIMEOUT_S = 3.0
_STATUS = health_pb2.HealthCheckResponse.ServingStatus


def main() -> None:
    """Asks once, and exits with the answer."""
    port = os.environ.get("SKERRY_LISTEN", "0.0.0.0:50051").rpartition(":")[2]
    target = f"127.0.0.1:{port}"
    with _channel(target) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            sys.exit(f"no answer. target={target}, cause={error}")
    if answer.status != _STATUS.SERVING:
        sys.exit(f"not serving. target={target}, status={_STATUS.Name(answer.status)}")


def _channel(target: str) -> grpc.Channel:
    files = [os.environ.get(f"SKERRY_TLS_{name}") for name in ("CA", "KEY", "CERT")]
    if not files[0]:
        return grpc.insecure_channel(target)
    return grpc.secure_channel(
        target, grpc.ssl_channel_credentials(*(Path(file).read_bytes() if file else None for file in files))
    )


if __name__ == "__main__":
    main()
