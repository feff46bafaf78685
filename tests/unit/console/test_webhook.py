"""Alerts reach a web hook once each, and their end once."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from skerry.history.alerts import Alert, Severity
from skerry_console.webhook import Webhook

FULL = Alert("SkerryStoreFull", "store", Severity.CRITICAL, "the store is full", "Free space.")


class Hook(HTTPServer):
    """A chat's server that remembers what it was sent."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.asked_count = 0
        self.status = 200
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        self.server.asked_count += 1
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.status == 200:
            self.server.texts.append(body["text"])
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hook() -> Iterator[Hook]:
    with Hook() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_an_alert_is_posted_once_and_its_end_once(hook: Hook) -> None:
    posting = Webhook(f"http://127.0.0.1:{hook.server_port}/hook", "demo")
    for raised in ([FULL], [FULL], [], []):
        posting.update(raised)
    assert hook.texts == ["[critical] demo: the store is full. Free space.", "[resolved] demo: the store is full"]


def test_what_the_hook_refuses_is_posted_again(hook: Hook) -> None:
    posting = Webhook(f"http://127.0.0.1:{hook.server_port}/hook", "demo")
    hook.status = 503
    posting.update([FULL, FULL._replace(subject="other")])
    assert hook.asked_count == 1, "a hook that fails is not asked again at once"
    hook.status = 200
    posting.update([FULL])
    assert len(hook.texts) == 1
