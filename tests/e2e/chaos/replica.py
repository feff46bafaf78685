"""`skerry serve` as the campaign starts it: `python -m tests.e2e.chaos.replica EVENTS SEED [serve's own options]`.

The product's own command with three differences: a `Board` stands before the store, inside the process on `file://` and
as a proxy on `s3://`, the calendar clock can be stepped, and log checkpoints come often enough for a short run. What
happens at the board is appended to EVENTS.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from functools import partial
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

from skerry.cli.main import cli
from skerry.net.loop_thread import LoopThread
from skerry_syncer import command
from skerry_syncer.run.host import HostSettings
from skerry_syncer.server import ServerSettings
from skerry_syncer.settings import ReplicaSettings
from skerry_syncer.store.objects.interface import Objects
from skerry_syncer.store.objects.local import LocalObjects
from skerry_syncer.store.objects.opening import open_objects
from tests.e2e.chaos.control import break_as_told, obey
from tests.e2e.chaos.faulty_store import FaultyStore
from tests.e2e.chaos.gateway_proxy import GatewayProxy
from tests.e2e.chaos.points import Board, Deed, Mode, Moment, Operation

_CHECKPOINT_EVERY = 100


def main(events_path: str, seed: str, *options: str) -> None:
    """Serves until it is told to end."""
    events = os.open(events_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def report(what: str, *words: str) -> None:
        os.write(events, json.dumps([what, *words]).encode() + b"\n")

    board = Board(
        seen=lambda operation: report("seen", *operation),
        hit=lambda operation, strike: report("hit", *operation, strike.moment, strike.deed),
        source=random.Random(seed),
        struck=set(),
    )

    def control(given: dict[str, Any]) -> None:
        if "mode" in given:
            board.mode = Mode(given["mode"])
        if "strikes" in given:
            board.struck = {(Operation(verb, kind), Moment(m), Deed(d)) for verb, kind, m, d in given["struck"]}
            board.death_at_s = time.monotonic() + given["death_in_s"]
            board.is_striking = given["strikes"]

    def opened(url: str, **options: Any) -> Objects:
        objects = open_objects(url, **options)
        return FaultyStore(objects, board) if isinstance(objects, LocalObjects) else objects

    if any(option.startswith("s3://") for option in options):
        gateway_port = urlsplit(os.environ["AWS_ENDPOINT"]).port
        assert gateway_port is not None
        port = LoopThread("chaos-gateway").run(GatewayProxy(gateway_port, board).open())
        os.environ.update(dict.fromkeys(("AWS_ENDPOINT", "AWS_ENDPOINT_URL"), f"http://127.0.0.1:{port}"))
    host = HostSettings(replica=ReplicaSettings(checkpoint_every=_CHECKPOINT_EVERY))
    break_as_told()
    obey(control)
    with (
        patch.object(command, "open_objects", opened),
        patch.object(command, "ServerSettings", partial(ServerSettings, host=host)),
    ):
        cli.main(["serve", *options], prog_name="skerry")


if __name__ == "__main__":
    main(*sys.argv[1:])
