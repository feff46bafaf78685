"""A syncer with roles as a process, its keys and tokens, and a client in Node that calls it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from cryptography import x509

from skerry import Tls
from skerry.v1 import runs_pb2 as runs
from skerry.v1 import types_pb2 as types
from skerry.wire.identity import Identity, Role
from tests.node.node_clients import POLICY, Answer, Caller, calling
from tests.support.made_keys import tls_of
from tests.support.made_tokens import in_thread
from tests.support.raw_learner import Stubs, connected, create_run
from tests.support.serve_process import serve_process

ADMIN = Identity(Role.ADMIN, "anna")
READER = Identity(Role.READER, "prom")
LEARNER = Identity(Role.LEARNER, "us")
LEARNER_OF_DEMO = Identity(Role.LEARNER, "us", "demo")
LEARNER_OF_GPT = Identity(Role.LEARNER, "us", "gpt")


class Served(NamedTuple):
    """A running server, and who talks to it."""

    client: Caller
    admin: Stubs
    run: types.Run  # demo, which the administrator created
    port: int


@dataclass(frozen=True)
class Deployment:
    """Where a syncer's keys and its store are, and the packages of its clients."""

    folder: Path
    node_modules: Path

    @property
    def keys(self) -> Path:
        return self.folder / "keys"

    @property
    def store_url(self) -> str:
        return (self.folder / "store").as_uri()

    def certificate(self, caller: Identity | None) -> Tls:
        """Returns what a caller connects with; nobody has a server's certificate, which names no client."""
        file = "a.example" if caller is None else f"{caller.run}{'.' if caller.run else ''}{caller.name}"
        return tls_of(self.keys, file)

    async def token(self, caller: Identity | None) -> Tls:
        """Returns what a caller connects with, which has a new token; nobody has none."""
        if caller is None:
            return tls_of(self.keys)
        run = ("--run", caller.run) if caller.run else ()
        words = ("--store", self.store_url, "--role", caller.role.value, "--name", caller.name, *run)
        return replace(tls_of(self.keys), token=(await in_thread("create", *words)).strip())

    @asynccontextmanager
    async def served(self, admin: Tls, *options: str) -> AsyncIterator[Served]:
        """Yields a server with the run demo, and a client that has no connection yet."""
        pair = ("--tls-cert", f"{self.keys}/a.example.pem", "--tls-key", f"{self.keys}/a.example.key")
        async with (
            serve_process(self.store_url, self.folder, *pair, *options) as server,
            connected(server.port, admin) as stubs,
            calling(self.node_modules, server.port) as client,
        ):
            run, _ = await create_run(stubs, policy=POLICY)
            yield Served(client, stubs, run, server.port)

    def serial(self) -> int:
        """Returns the serial number of the server's certificate on disk."""
        return x509.load_pem_x509_certificate((self.keys / "a.example.pem").read_bytes()).serial_number


async def attach(served: Served, channel: str, learner_id: str) -> Answer:
    """Attaches a learner to the run for as long as the connection lives."""
    run = {"run": served.run.name, "run_uid": served.run.uid}
    session = learner_id.encode().hex().zfill(32)
    return await served.client.hold(channel, "Exchange/Attach", **run, learner_id=learner_id, session_id=session)


async def hears(served: Served, channel: str, quorum_count: int) -> None:
    """Returns when the attachment of the connection has told of a change that the administrator makes now."""
    changed = runs.SetPolicyRequest(
        request_id=f"{quorum_count:032x}", name="demo", policy=types.Policy(quorum_count=quorum_count)
    )
    await served.admin.runs.SetPolicy(changed)
    while True:
        answer = await served.client.heard(channel)
        assert answer.code == "OK", answer
        event: dict[str, Any] = answer.answer["event"]
        if event["kind"] == "policy_changed" and event["policy_changed"]["quorum_count"] == quorum_count:
            return
