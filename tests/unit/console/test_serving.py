"""Who reaches a console that asks for client certificates, and who changes runs with it."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from skerry import RunsClient
from skerry.v1.types_pb2 import RUN_STATUS_OPEN
from tests.support.console_thread import console
from tests.support.made_keys import make_keys, tls_of
from tests.support.syncer_thread import syncer


def closed(url: str, folder: Path, name: str | None) -> int:
    """Returns the status with which a run is closed by a holder of that certificate."""
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    if name is not None:
        context.load_cert_chain(folder / f"{name}.pem", folder / f"{name}.key")
    headers = {"X-Skerry-Console": "1"}
    request = urllib.request.Request(f"{url}/runs/demo/actions/close", b"{}", headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=20, context=context) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_run_is_changed_by_an_admin_and_seen_by_whoever_has_a_certificate(tmp_path: Path) -> None:
    make_keys(tmp_path, "--server=127.0.0.1", "--admin=anna", "--reader=eve")
    with syncer() as target, RunsClient(target) as client:
        client.create_run("demo", {"w": np.zeros(4, np.float32)})
        with console(target, allows_actions=True, tls=tls_of(tmp_path, "127.0.0.1")) as url:
            with pytest.raises(OSError, match=r"(?i)certificate required|reset|closed|EOF"):
                closed(url, tmp_path, None)
            assert closed(url, tmp_path, "eve") == 403
            assert client.get_run("demo").run.status == RUN_STATUS_OPEN
            assert closed(url, tmp_path, "anna") == 200
