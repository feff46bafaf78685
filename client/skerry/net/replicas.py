"""The syncer replicas that a client may call: each call goes to the next healthy one.

Any replica may take any call: a request carries the log position that the caller has seen, and a replica reads the log
at least that far before it answers. So calls are spread over all replicas, and a repeated call tries another one.

A target whose name has several addresses is a replica for each of them. Of several replicas, those are ready that
accept connections and answer SERVING to `grpc.health.v1`, and that do not hang (`skerry.net.liveness`); a server
without that service counts as healthy. A single replica is called whatever its health is, since its own refusal says
more than no answer.

Targets on this machine are called in plaintext and others with TLS, unless the client says otherwise. The files of TLS
are read again when a connection can't be made, so that renewed certificates come into use.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final
from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]  # its published types lack it

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from skerry.errors import SkerryError, error_of
from skerry.net.liveness import Liveness, Vigil
from skerry.net.tls import Insecure, Tls, is_here, is_loopback, tls_for
from skerry.runtime.addresses import client_address
from skerry.runtime.logs import get_logger
from skerry.runtime.redaction import redacted
from skerry.v1 import capabilities_pb2_grpc, exchange_pb2_grpc, runs_pb2_grpc

_log = get_logger(__name__)

_BALANCED: Final[dict[str, Any]] = {"loadBalancingConfig": [{"round_robin": {}}]}
_HEALTH_CHECKED: Final[dict[str, Any]] = {**_BALANCED, "healthCheckConfig": {"serviceName": ""}}
_OPTIONS: Final[list[tuple[str, int | str]]] = [
    # Each channel has a connection of its own, so that reports never queue behind bulk data.
    ("grpc.use_local_subchannel_pool", 1),
    # Compressed answers are refused: a hostile server could have them inflate to any size.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.per_message_decompression", 0),
    # An unanswered ping reveals a half-open connection; a deadline would have to guess how long a transfer takes.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # A syncer that restarts is back within seconds; gRPC's default back-off grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # How long an attempt to connect may take, in spite of its name: with TLS four round trips, and a lost packet.
    ("grpc.min_reconnect_backoff_ms", 5_000),
]
# How long a call waits for a replica to become ready: a little longer than the longest pause between two connections.
_CONNECT_S: Final = 2.5
# Between two looks at the channels meanwhile; looking costs microseconds.
_LOOK_S: Final = 0.01
# For an answer over a fresh connection, which is then asked for over another one.
_FRESH_S: Final = 3.0
# Between two look-ups of names.
_LOOK_UP_S: Final = 30.0
# The number of the connection for attach and small calls; others are lanes of bulk, from 0 on.
CONTROL: Final = -1
_PROXIES: Final = ("grpc_proxy", "https_proxy", "http_proxy")  # the variables that gRPC looks at, the first one first
# What a call ends with that nobody has answered; with any other status a server is alive.
_UNANSWERED: Final = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}
)


class Connection:
    """One connection to a replica: its channel, and the stubs of its services. It connects when it is first called."""

    def __init__(self, replica: Replica, channel: grpc.aio.Channel) -> None:
        self.replica = replica
        self.files = replica.files
        self.channel = channel
        self.exchange = exchange_pb2_grpc.ExchangeStub(channel)
        self.runs = runs_pb2_grpc.RunsStub(channel)
        self.capabilities = capabilities_pb2_grpc.CapabilitiesStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)


class Replica:
    """One address that may be called: its connections, the calls on them, and its life."""

    def __init__(self, target: str, tls: Tls | Insecure | None, *, address: str = "", is_alone: bool) -> None:
        """Takes the target, and one of the addresses of its name if that has several."""
        self.name = address or target
        self.life = Liveness()
        self._tls = tls_for(target, tls)
        config = json.dumps(_BALANCED if is_alone else _HEALTH_CHECKED)
        self._options = [*_OPTIONS, ("grpc.service_config", config)]
        if is_here(target):  # gRPC would ask a proxy of the environment for this machine
            self._options.append(("grpc.enable_http_proxy", 0))
        if address:
            self._options.append(("grpc.default_authority", target))
        self.files = None if self._tls is None else self._tls.read()
        self._connections: dict[int, Connection] = {}
        self.calls: set[Any] = set()  # that are under way
        self.hang: SkerryError | None = None  # why those ended that were under way when it was given up

    def connection(self, number: int) -> Connection:
        """Returns the connection of this number; it is made when it is first asked for."""
        if number not in self._connections:
            self._connections[number] = self._new_connection()
        return self._connections[number]

    def _new_connection(self) -> Connection:
        if self.files is None:
            return Connection(self, grpc.aio.insecure_channel(self.name, options=self._options))
        credentials = grpc.ssl_channel_credentials(self.files.ca, self.files.key, self.files.cert)
        return Connection(self, grpc.aio.secure_channel(self.name, credentials, options=self._options))

    async def renew(self, number: int) -> None:
        """Drops a connection that can't be made, if the files of TLS hold other certificates now."""
        broken = self.connection(number)
        if self._tls is None or broken.channel.get_state() is not grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            return
        with contextlib.suppress(ValueError):  # files that are being replaced are read again before the next call
            self.files = self._tls.read(self.files)
        if broken.files is not self.files:
            del self._connections[number]
            await broken.channel.close(None)

    def is_ready(self, number: int) -> bool:
        """Whether a call over this connection would be sent at once; if not, connects."""
        state = self.connection(number).channel.get_state(try_to_connect=True)
        return state is grpc.ChannelConnectivity.READY and not self.life.is_lost

    async def serves(self, *, is_fresh: bool) -> bool:
        """Returns once it has answered whether it takes calls."""
        connection = self._new_connection() if is_fresh else self.connection(CONTROL)
        try:
            timeout_s = _FRESH_S if is_fresh else None
            answer = await connection.health.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() in _UNANSWERED:
                raise error_of("UNREACHABLE", f"the replica was not asked. replica={self.name}") from error
            return True  # it has no such service, or wants to know who asks
        except grpc.aio.UsageError as error:
            raise error_of("UNREACHABLE", "connection is closed") from error
        finally:
            if is_fresh:
                await connection.channel.close(None)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def give_up(self, error: SkerryError) -> None:
        """Fails its calls with `error` and closes its connections."""
        given_up, self.calls, self.hang = self.calls, set(), error
        for call in given_up:
            call.cancel()
        await self.close()

    async def close(self) -> None:
        """Closes every connection; calls in flight fail."""
        closed, self._connections = self._connections, {}
        for connection in closed.values():
            await connection.channel.close(None)


class Replicas:
    """The replicas of a client's targets; to be used on one event loop."""

    def __init__(self, targets: Sequence[str], tls: Tls | Insecure | None) -> None:
        """Begins with the first target."""
        self._targets, self._tls = tuple(targets), tls
        self.has_tls = any(tls_for(target, tls) for target in targets)
        self.proxy = next(filter(None, map(proxy_of, targets)), "")
        if self.proxy and not self.has_tls:
            _log.warning(f"calls go through a proxy, in plaintext. {self.proxy}")
        self._replicas = {(target, ""): Replica(target, tls, is_alone=len(targets) == 1) for target in targets}
        self._gone: list[Replica] = []  # whose address the name no longer has, while they have calls
        self._turns: Counter[int] = Counter()  # the place of the next replica, by the number of the connection
        # A proxy wants names as they are.
        self._looks_up_at_s = float("-inf") if any(map(_is_name, targets)) and not self.proxy else float("inf")
        self._vigil = Vigil(self)
        self._is_closed = False

    def __iter__(self) -> Iterator[Replica]:
        return iter((*self._replicas.values(), *self._gone))

    @property
    def has_others(self) -> bool:
        """Whether there is more than one."""
        return len(self._replicas) > 1

    async def next(self, number: int = CONTROL) -> Connection:
        """Returns the connection of this number to the next replica that is ready.

        If none is, to the next one, so that the call itself says what is wrong.

        Raises:
            TryAgainError: UNREACHABLE: the connections were closed.
        """
        if not self._is_closed and asyncio.get_running_loop().time() >= self._looks_up_at_s:
            await self._look_up()
        for replica in self:
            if not self._is_closed:
                await replica.renew(number)
        replicas, loop = list(self._replicas.values()), asyncio.get_running_loop()
        turn, deadline_s = self._turns[number] % len(replicas), loop.time() + _CONNECT_S
        order = replicas[turn:] + replicas[:turn]
        # gRPC would tell of changes too, but waiting for one of several channels leaves watches of the others.
        while not self._is_closed:
            ready = [replica for replica in order if replica.is_ready(number)]
            if ready or len(order) == 1 or loop.time() >= deadline_s:
                chosen = (ready or order)[0]
                self._turns[number] = replicas.index(chosen) + 1
                self._vigil.begin()
                return chosen.connection(number)
            await asyncio.sleep(_LOOK_S)
        raise error_of("UNREACHABLE", "connection is closed")

    def begin(self, count: int) -> None:
        """Begins to make the connections of the numbers below `count`, so that calls over them need not wait."""
        for replica in self:
            for number in range(count):
                replica.is_ready(number)

    async def close(self) -> None:
        """Closes every connection; calls in flight fail."""
        self._is_closed = True
        await self._vigil.end()
        for replica in self:
            await replica.close()

    async def _look_up(self) -> None:
        """Looks the names up and keeps a replica for each address; one whose address is gone gets no new calls."""
        self._looks_up_at_s = asyncio.get_running_loop().time() + _LOOK_UP_S
        keys: list[tuple[str, str]] = []
        try:
            async with asyncio.timeout(_CONNECT_S):
                for target in self._targets:
                    addresses = await _addresses(target) if _is_name(target) else []
                    keys += [(target, address) for address in addresses or [""]]
        except OSError:  # names can't be looked up now
            return
        gone = [*self._gone, *(replica for key, replica in self._replicas.items() if key not in keys)]
        self._replicas = {
            key: self._replicas.get(key) or Replica(key[0], self._tls, address=key[1], is_alone=len(keys) == 1)
            for key in keys
        }
        self._gone = [replica for replica in gone if replica.calls]
        for replica in gone:
            if not replica.calls:
                await replica.close()


def proxy_of(target: str) -> str:
    """Returns a target, and variable and URL of the proxy that it is called through, without secrets; "" for none."""
    address, variables = client_address(target), os.environ  # noqa: TID251 - gRPC looks there
    left_out = variables.get("no_grpc_proxy") or variables.get("no_proxy", "")
    if address is None or is_loopback(address.host) or proxy_bypass_environment(address.host, {"no": left_out}):
        return ""
    urls = {name: variables.get(name) for name in _PROXIES}
    return next((f"target={target}, {name}={redacted(url)}" for name, url in urls.items() if url), "")


def _is_name(target: str) -> bool:
    """Whether a target may stand for several machines: neither an address nor this machine."""
    address = client_address(target)
    if address is None or target != f"{address.host}:{address.port}":
        return False
    return not is_loopback(address.host) and not address.host.replace(".", "").isdecimal()


async def _addresses(target: str) -> list[str]:
    """Returns the addresses of a target's name, as targets of gRPC; none where it has one of a kind.

    Raises:
        OSError: the name can't be looked up.
    """
    address = client_address(target)
    assert address is not None  # it is a name
    infos = await asyncio.get_running_loop().getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    hosts = dict.fromkeys((family, info[0]) for family, _, _, _, info in infos)
    if max(Counter(family for family, _ in hosts).values(), default=0) < 2:  # a machine may have one of each
        return []
    return [
        f"ipv6:[{host}]:{address.port}" if family is socket.AF_INET6 else f"ipv4:{host}:{address.port}"
        for family, host in hosts
    ]
