"""Which replica a call goes to while the addresses of a name change."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from skerry.net import replicas as net


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
