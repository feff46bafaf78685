"""A client in another language, from the committed .proto files alone: float32 without compression, in Node."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import grpc
import pytest

from skerry import Tls
from skerry.runtime.identifiers import SystemEntropy
from skerry.v1 import capabilities_pb2
from skerry.wire.identity import Identity
from skerry_syncer.server import ServerSettings, serving
from skerry_syncer.store.objects.opening import open_objects
from skerry_syncer.store.tokens import create_token, revoke_token, token_digest
from tests.node.node_clients import POLICY, check_steps, train
from tests.support.made_keys import make_keys, tls_of
from tests.support.raw_learner import Stubs, connected, create_run


@pytest.mark.parametrize("has_tls", [False, True], ids=["plaintext", "mutual TLS"])
async def test_a_node_client_follows_a_run_pulls_pushes_and_sees_its_delta_merged(
    has_tls: bool, node_modules: Path, tmp_path: Path
) -> None:
    tls: Tls | None = None
    own: Tls | None = None
    pems: tuple[Path, ...] = ()
    if has_tls:
        make_keys(tmp_path / "keys", "--server", "localhost", "--learner", "node", "--admin", "anna")
        tls, own = tls_of(tmp_path / "keys", "localhost"), tls_of(tmp_path / "keys", "anna")
        pems = tuple(tmp_path / "keys" / name for name in ("ca.pem", "node.pem", "node.key"))
    settings = ServerSettings(listen="127.0.0.1:0", tls=tls)
    async with (
        serving(open_objects((tmp_path / "store").as_uri()), settings) as server,
        connected(server.port, own) as stubs,
    ):
        await create_run(stubs, policy=POLICY)
        status, output, errors = await train(node_modules, server.port, *pems)
    assert status == 0, errors
    check_steps(output)


async def test_so_it_does_over_tls_with_a_token_until_that_is_revoked(
    node_modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skerry_syncer.access.token_book.POLL_S", 0.1)
    make_keys(tmp_path / "keys", "--server", "localhost")
    ca = tmp_path / "keys" / "ca.pem"
    objects = open_objects((tmp_path / "store").as_uri())
    anna, own, other = [
        await create_token(objects, Identity.parse(uri), SystemEntropy(), now_unix_s=time.time(), lifetime_s=600)
        for uri in ("skerry://admin/anna", "skerry://learner/demo/node", "skerry://learner/other/node")
    ]
    settings = ServerSettings(
        listen="127.0.0.1:0", tls=tls_of(tmp_path / "keys", "localhost", ca=False), has_tokens=True
    )
    async with serving(objects, settings) as server, connected(server.port, Tls(ca=ca, token=anna)) as stubs:
        async with asyncio.timeout(10):
            while not await is_known(stubs):
                await asyncio.sleep(0.1)
        await create_run(stubs, policy=POLICY)
        status, output, errors = await train(node_modules, server.port, ca, token=own)
        assert status == 0, errors
        check_steps(output)
        assert "PERMISSION_DENIED" in (await train(node_modules, server.port, ca, token=other))[2]
        assert "UNAUTHENTICATED" in (await train(node_modules, server.port, ca))[2]
        await revoke_token(objects, token_digest(own), now_unix_s=time.time())
        async with asyncio.timeout(10), connected(server.port, Tls(ca=ca, token=own)) as revoked:
            while await is_known(revoked):
                await asyncio.sleep(0.1)
        assert "UNAUTHENTICATED" in (await train(node_modules, server.port, ca, token=own))[2]


async def is_known(stubs: Stubs) -> bool:
    answer = stubs.capabilities.GetCapabilities(capabilities_pb2.GetCapabilitiesRequest())
    return await answer.code() is grpc.StatusCode.OK
