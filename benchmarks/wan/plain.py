"""Bytes over plain TCP, which is what a link brings without Skerry: `--serve` sends to whoever asks.

A client fetches once over new connections, and prints how long it took.
"""

from __future__ import annotations

import argparse
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

_CHUNK: Final = 1 << 20
_PORT: Final = 50_052


def serve() -> None:
    """Sends each client as many bytes as it asks for; does not return."""
    with socket.create_server(("0.0.0.0", _PORT), backlog=128) as server, ThreadPoolExecutor(64) as threads:
        print(json.dumps({}), flush=True)
        while True:
            threads.submit(_send, server.accept()[0])


def _send(client: socket.socket) -> None:
    with client:
        left = int.from_bytes(client.recv(8), "big")
        while left:
            left -= client.send(bytes(min(left, _CHUNK)))


def fetch(host: str, size_bytes: int) -> None:
    """Receives so many bytes over a new connection."""
    with socket.create_connection((host, _PORT)) as connection:
        connection.sendall(size_bytes.to_bytes(8, "big"))
        buffer = bytearray(_CHUNK)
        while connection.recv_into(buffer):
            pass


def main() -> None:
    """Does as the arguments say."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--host", default="")
    parser.add_argument("--bytes", type=int, default=0)
    parser.add_argument("--connections", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
    each = arguments.bytes // arguments.connections
    begin_s = time.monotonic()
    with ThreadPoolExecutor(arguments.connections) as threads:
        for done in [threads.submit(fetch, arguments.host, each) for _ in range(arguments.connections)]:
            done.result()
    answer = {"wall_s": time.monotonic() - begin_s, "size_bytes": each * arguments.connections}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
