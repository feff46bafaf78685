"""Serves a process's metrics over HTTP, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import start_http_server
from prometheus_client.registry import Collector

from skerry.runtime.addresses import server_address


@contextmanager
def exposed(metrics: Collector, address: str) -> Iterator[str]:
    """Answers requests on `address` (HOST:PORT; port 0: any free one) while the context lasts; yields the URL.

    `metrics` is collected on a thread of its own, once for each request.

    Raises:
        ValueError: the address is not HOST:PORT.
        OSError: the address can't be listened on.
    """
    host, port = server_address(address)
    server, thread = start_http_server(port, host, metrics)
    try:
        yield f"http://{address.rpartition(':')[0]}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
