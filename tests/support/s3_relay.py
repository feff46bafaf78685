"""A relay in front of an S3 server that stands for worse servers: it drops headers, cuts answers, or refuses."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

_OF_ONE_CONNECTION = frozenset({"connection", "transfer-encoding", "keep-alive"})


@dataclass
class S3Relay:
    """What happens to requests, and what was asked; may be changed at any time."""

    endpoint: str = ""
    ignores_conditions: bool = False  # If-None-Match never arrives
    cut_bytes: int | None = None  # the connection breaks after this much of an answer's body
    requests: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, Range header

    def reads(self, name: str) -> list[str]:
        """Returns the ranges of every GET of an object, empty where it had none."""
        return [asked for method, path, asked in self.requests if method == "GET" and path.endswith(name)]


@contextmanager
def s3_relay(endpoint: str) -> Iterator[S3Relay]:
    """Yields a relay to the S3 server at `endpoint`."""
    relay, target = S3Relay(), urlsplit(endpoint).netloc

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one_request(self) -> None:
            with contextlib.suppress(ConnectionError):
                super().handle_one_request()

        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            relay.requests.append((self.command, self.path.partition("?")[0], self.headers.get("Range", "")))
            headers = dict(self.headers.items())
            if relay.ignores_conditions:
                headers = {name: value for name, value in headers.items() if name.lower() != "if-none-match"}
            server = http.client.HTTPConnection(target, timeout=30)
            server.request(self.command, self.path, body, headers)
            answer = server.getresponse()
            data = answer.read()
            server.close()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in _OF_ONE_CONNECTION | {"content-length"}:
                    self.send_header(name, value)
            size = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
            self.send_header("Content-Length", size or "0")
            self.end_headers()
            is_cut = relay.cut_bytes is not None and self.command == "GET" and len(data) > relay.cut_bytes
            self.wfile.write(data[: relay.cut_bytes] if is_cut else data)
            self.close_connection = self.close_connection or is_cut

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on  # noqa: N815 - names of http.server

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name in http.server
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        relay.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield relay
        finally:
            server.shutdown()
            thread.join()
