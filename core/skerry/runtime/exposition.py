"""Serves a process's metrics over HTTP, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import start_http_server
from prometheus_client.registry import Collector


@contextmanager
def exposed(metrics: Collector, address: str) -> Iterator[str]:
    """Answers requests on `address` (HOST:PORT; port 0: any free one) while the context lasts; yields the URL.

    `metrics` is collected on a thread of its own, once for each request.

    Raises:
        ValueError: the address is not HOST:PORT.
        OSError: the address can't be listened on.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"use HOST:PORT, for example 127.0.0.1:9464. address={address!r}")
    server, thread = start_http_server(int(port), host.strip("[]"), metrics)
    try:
        yield f"http://{host}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
