"""Google Cloud Storage's XML API, kept by an S3 server: `python -m tests.support.google_storage`.

The two APIs differ little, and obstore uses no other. What differs is done here: Google's condition for a put, its
limit of one write a second to a name, a delete of a missing object that is an error, and tokens instead of signatures,
which the metadata service beside it gives out. A bucket is one of the S3 server, whose credentials are those of the
environment. Left out are generations of objects.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

TOKEN_PATH: Final = "/computeMetadata/v1/instance/service-accounts/default/token"
_FORWARDED: Final = ("Range", "Content-Type")
_RETURNED: Final = ("ETag", "Last-Modified", "Content-Type", "Content-Range")
_START: Final = {"Range": "bytes=0-0"}
_TIMEOUT_S: Final = 60
_WRITE_EVERY_S: Final = 1.0


class GoogleStorage(ThreadingHTTPServer):
    """The server: storage and metadata service on one port of loopback."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int, s3_endpoint: str, *, token_lifetime_s: float = 3600.0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.s3 = urlsplit(s3_endpoint)
        self.signer = S3SigV4Auth(
            Credentials(os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]), "s3", "us-east-1"
        )
        self.token_lifetime_s = token_lifetime_s
        self.written_s: dict[str, float] = {}  # when each name was last written or deleted
        self._ends_s: dict[str, float] = {}  # of each token that was given out
        self._numbers = itertools.count()

    @property
    def address(self) -> str:
        """Host and port."""
        return f"127.0.0.1:{self.server_port}"

    def env(self) -> dict[str, str]:
        """What leads a client that has no credentials of its own to storage and metadata service."""
        return {"GOOGLE_BASE_URL": f"http://{self.address}", "GCE_METADATA_HOST": self.address}

    def new_token(self) -> str:
        """Returns a token that is good from now on for `token_lifetime_s`."""
        token = f"token-{next(self._numbers)}"
        self._ends_s[token] = time.monotonic() + self.token_lifetime_s
        return token

    def is_good(self, token: str) -> bool:
        """Whether the token was given out and has not ended."""
        return time.monotonic() < self._ends_s.get(token, 0.0)

    @property
    def token_count(self) -> int:
        """How many were given out."""
        return len(self._ends_s)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: GoogleStorage

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except ConnectionError:  # of a client that was killed
            self.close_connection = True

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        is_write = self.command in {"PUT", "DELETE"} and not query
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if path == TOKEN_PATH:
            token = {"access_token": self.server.new_token(), "expires_in": int(self.server.token_lifetime_s)}
            self._answer(200 if self.headers["Metadata-Flavor"] == "Google" else 403, {}, json.dumps(token).encode())
        elif not self.server.is_good(self.headers.get("Authorization", "").removeprefix("Bearer ")):
            self._answer(401, {}, b"<Error><Code>AuthenticationRequired</Code></Error>")
        elif is_write and time.monotonic() < self.server.written_s.get(path, -_WRITE_EVERY_S) + _WRITE_EVERY_S:
            self._answer(429, {}, b"<Error><Code>SlowDown</Code></Error>")
        elif (
            self.command == "DELETE" and not query and (missing := self._asked("GET", path, "", b"", _START))[0] == 404
        ):
            self._answer(*missing)
        else:
            headers = {name: self.headers[name] for name in _FORWARDED if name in self.headers}
            if self.headers.get("x-goog-if-generation-match") == "0":
                headers["If-None-Match"] = "*"
            answer = self._asked(self.command, path, query, body, headers)
            if is_write and answer[0] < 300:
                self.server.written_s[path] = time.monotonic()
            self._answer(*answer)

    do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815 - the library's names

    def _asked(
        self, method: str, path: str, query: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, dict[str, str], bytes]:
        """Returns the S3 server's answer: status, headers and body."""
        server = self.server
        target = quote(unquote(path), safe="/-_.~")
        if query:
            target += "?" + urlencode(parse_qsl(query, keep_blank_values=True), quote_via=quote)
        request = AWSRequest(method, f"{server.s3.geturl()}{target}", headers=headers, data=body)
        server.signer.add_auth(request)
        connection = http.client.HTTPConnection(server.s3.hostname or "", server.s3.port, timeout=_TIMEOUT_S)
        try:
            connection.request(method, target, body, dict(request.headers.items()))
            answer = connection.getresponse()
            returned = {name: answer.headers[name] for name in _RETURNED if name in answer.headers}
            return answer.status, returned, answer.read()
        except (OSError, http.client.HTTPException):
            return 503, {}, b""
        finally:
            connection.close()

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in {**headers, "x-goog-generation": "1", "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def google_storage(s3_endpoint: str, *, port: int = 0, token_lifetime_s: float = 3600.0) -> Iterator[GoogleStorage]:
    """Yields a server whose threads are this process's."""
    with GoogleStorage(port, s3_endpoint, token_lifetime_s=token_lifetime_s) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


if __name__ == "__main__":
    # Port, URL of the S3 server, seconds for which a token is good.
    GoogleStorage(int(sys.argv[1]), sys.argv[2], token_lifetime_s=float(sys.argv[3])).serve_forever()
