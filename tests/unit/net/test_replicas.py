"""Which replica a call goes to while the addresses of a name change."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import grpc
import pytest

from skerry.net import replicas as net
from skerry.net.grpc_transport import GrpcTransport

_FAR_S = 0.3  # one way to a server on the other side of the world, through a busy satellite


async def test_a_replica_whose_address_is_gone_ends_its_calls_and_gets_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, hosts = socket.getaddrinfo, ["127.0.0.2", "127.0.0.3"]

    def addresses(_host: str, *arguments: Any, **options: Any) -> list[Any]:
        return [info for host in hosts for info in own(host, *arguments, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", addresses)
    monkeypatch.setattr(net, "_LOOK_UP_S", 0.0)
    monkeypatch.setattr(net, "_CONNECT_S", 0.5)
    replicas = net.Replicas(["syncer.test:1"], "insecure")
    await replicas.next()
    gone, kept = replicas
    call = asyncio.create_task(asyncio.sleep(60))
    gone.calls.add(call)
    del hosts[0]
    hosts.append("127.0.0.4")
    chosen = [await replicas.next() for _ in range(4)]
    assert kept.connection(net.CONTROL) in chosen
    assert gone.connection(net.CONTROL) not in chosen
    assert gone in list(replicas)
    gone.calls.clear()
    await replicas.next()
    assert gone not in list(replicas)
    call.cancel()
    await replicas.close()


async def test_a_far_server_is_reached_at_the_first_attempt() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    attempts = 0

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(2**16):
            await asyncio.sleep(_FAR_S)
            writer.write(data)
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal attempts
        attempts += 1
        await asyncio.sleep(2 * _FAR_S)
        there, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(carry(reader, back), carry(there, writer), return_exceptions=True)

    async with await asyncio.start_server(relay, "127.0.0.1", 0) as far:
        replica = net.Replica(f"127.0.0.1:{far.sockets[0].getsockname()[1]}", "insecure", is_alone=True)
        replica.is_ready(net.CONTROL)
        async with asyncio.timeout(20):
            await replica.connection(net.CONTROL).channel.channel_ready()
        await replica.close()
    await server.stop(None)
    assert attempts == 1


async def test_bulk_connections_are_begun_before_anything_is_called() -> None:
    count, all_begun = 0, asyncio.Event()

    async def accept(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        if count == 3:
            all_begun.set()
        writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        target = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        transport = GrpcTransport(target, tls="insecure", lane_count=3)
        async with asyncio.timeout(20):
            await all_begun.wait()
        await transport.close()
