"""The syncer replicas that a client may call: each call goes to the next healthy one.

Any replica may take any call: a request carries the log position that the caller has seen, and a replica reads the log
at least that far before it answers. So calls are spread over all replicas, and a repeated call tries another one.

Each target has a gRPC channel, which spreads its calls over the addresses of the target's name. Of several targets,
those are ready that accept connections and answer SERVING to `grpc.health.v1`; a server without that service counts as
healthy. A single target is called whatever its health is, since its own refusal says more than no answer.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import grpc

from skerry.client.errors import error_of
from skerry.v1 import capabilities_pb2_grpc, exchange_pb2_grpc, runs_pb2_grpc

_BALANCED: Final[dict[str, Any]] = {"loadBalancingConfig": [{"round_robin": {}}]}
_HEALTH_CHECKED: Final[dict[str, Any]] = {**_BALANCED, "healthCheckConfig": {"serviceName": ""}}
_OPTIONS: Final[list[tuple[str, int | str]]] = [
    # Each channel has a connection of its own, so that reports never queue behind bulk data.
    ("grpc.use_local_subchannel_pool", 1),
    # An unanswered ping reveals a half-open connection; a deadline would have to guess how long a transfer takes.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # A syncer that restarts is back within seconds; gRPC's default back-off grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]
# How long a call waits for a replica to become ready: a little longer than the longest pause between two connections.
_CONNECT_S: Final = 2.5
# Between two looks at the channels meanwhile; looking costs microseconds.
_LOOK_S: Final = 0.01


def split_targets(targets: str) -> tuple[str, ...]:
    """Returns the targets of a list such as `a:443,b:443`.

    Raises:
        ValueError: one of them is empty.
    """
    found = tuple(target.strip() for target in targets.split(","))
    if not all(found):
        raise ValueError(f"a target is empty; write host:port, or several separated by commas. target={targets!r}")
    return found


class Replica:
    """One target: its channel, and the stubs of its services."""

    def __init__(self, target: str, credentials: grpc.ChannelCredentials | None, *, is_alone: bool) -> None:
        config = json.dumps(_BALANCED if is_alone else _HEALTH_CHECKED)
        options = [*_OPTIONS, ("grpc.service_config", config)]
        if credentials is None:
            self.channel = grpc.aio.insecure_channel(target, options=options)
        else:
            self.channel = grpc.aio.secure_channel(target, credentials, options=options)
        self.exchange = exchange_pb2_grpc.ExchangeStub(self.channel)
        self.runs = runs_pb2_grpc.RunsStub(self.channel)
        self.capabilities = capabilities_pb2_grpc.CapabilitiesStub(self.channel)


class Replicas:
    """The targets of a client, each with a connection for one kind of calls; to be used on one event loop."""

    def __init__(self, targets: Sequence[str], credentials: grpc.ChannelCredentials | None) -> None:
        """Begins with the first target."""
        self._replicas = deque(Replica(target, credentials, is_alone=len(targets) == 1) for target in targets)
        self._is_closed = False

    async def next(self) -> Replica:
        """Returns the next replica that is ready; or else the next one, so that the call itself says what is wrong.

        Raises:
            TryAgainError: UNREACHABLE: the connections were closed.
        """
        if len(self._replicas) > 1:
            loop = asyncio.get_running_loop()
            deadline_s = loop.time() + _CONNECT_S
            # gRPC would tell of changes too, but waiting for one of several channels leaves watches of the others.
            while not self._is_closed and not self._has_found() and loop.time() < deadline_s:  # noqa: ASYNC110 - no event to wait for
                await asyncio.sleep(_LOOK_S)
        if self._is_closed:
            raise error_of("UNREACHABLE", "connection is closed")
        self._replicas.rotate(-1)
        return self._replicas[-1]

    def _has_found(self) -> bool:
        """Moves the next ready replica to the front, and says whether there is one."""
        states = [replica.channel.get_state(try_to_connect=True) for replica in self._replicas]
        if grpc.ChannelConnectivity.READY not in states:
            return False
        self._replicas.rotate(-states.index(grpc.ChannelConnectivity.READY))
        return True

    async def close(self) -> None:
        """Closes every connection; calls in flight fail."""
        self._is_closed = True
        for replica in self._replicas:
            await replica.channel.close(None)
