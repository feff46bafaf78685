"""The syncer replicas that a client may call: each call goes to the next healthy one.

Any replica may take any call: a request carries the log position that the caller has seen, and a replica reads the log
at least that far before it answers. So calls are spread over all replicas, and a repeated call tries another one.

Each target has a gRPC channel, which spreads its calls over the addresses of the target's name. Of several targets,
those are ready that accept connections and answer SERVING to `grpc.health.v1`; a server without that service counts as
healthy. A single target is called whatever its health is, since its own refusal says more than no answer.

Targets on this machine are called in plaintext and others with TLS, unless the client says otherwise. The files of TLS
are read again when a connection can't be made, so that renewed certificates come into use.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import grpc

from skerry.client.errors import error_of
from skerry.runtime.tls import Insecure, Tls, tls_for
from skerry.v1 import capabilities_pb2_grpc, exchange_pb2, exchange_pb2_grpc, runs_pb2_grpc
from skerry.wire.bulk import DataResponse, serialized

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
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]
# How long a call waits for a replica to become ready: a little longer than the longest pause between two connections.
_CONNECT_S: Final = 2.5
# Between two looks at the channels meanwhile; looking costs microseconds.
_LOOK_S: Final = 0.01


class Replica:
    """One target: its channel, and the stubs of its services."""

    def __init__(self, target: str, tls: Tls | Insecure | None, *, is_alone: bool) -> None:
        config = json.dumps(_BALANCED if is_alone else _HEALTH_CHECKED)
        self._target, self._tls = target, tls_for(target, tls)
        self._options = [*_OPTIONS, ("grpc.service_config", config)]
        self._files = None if self._tls is None else self._tls.read()
        self._connect()

    async def renew(self) -> None:
        """Connects with the certificates that the files hold now, if they changed and no connection can be made."""
        if self._tls is None or self.channel.get_state() is not grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            return
        with contextlib.suppress(ValueError):  # files that are being replaced are read again before the next call
            files = self._tls.read(self._files)
            if files is not self._files:
                broken, self._files = self.channel, files
                self._connect()
                await broken.close(None)

    def _connect(self) -> None:
        if self._files is None:
            self.channel = grpc.aio.insecure_channel(self._target, options=self._options)
        else:
            credentials = grpc.ssl_channel_credentials(self._files.ca, self._files.key, self._files.cert)
            if self._tls is not None and (self._tls.token_file or self._tls.token):
                plugin = grpc.metadata_call_credentials(self._authorize)  # type: ignore[arg-type]  # any callable
                credentials = grpc.composite_channel_credentials(credentials, plugin)
            self.channel = grpc.aio.secure_channel(self._target, credentials, options=self._options)
        self.exchange = exchange_pb2_grpc.ExchangeStub(self.channel)
        # In place of the generated ones, which have protobuf copy what they send and receive.
        self.exchange.PushDelta = self.channel.stream_unary(
            "/skerry.v1.Exchange/PushDelta", serialized, exchange_pb2.PushDeltaResponse.FromString
        )
        self.exchange.PullFragment = self.channel.unary_stream(
            "/skerry.v1.Exchange/PullFragment", serialized, DataResponse.FromString
        )
        self.runs = runs_pb2_grpc.RunsStub(self.channel)
        self.capabilities = capabilities_pb2_grpc.CapabilitiesStub(self.channel)

    def _authorize(self, _: grpc.AuthMetadataContext, callback: grpc.AuthMetadataPluginCallback) -> None:
        """Gives a call the token as it is now; called by threads of gRPC, and only for calls over TLS."""
        assert self._tls is not None, "there is a token"
        try:
            callback((("authorization", f"Bearer {self._tls.bearer()}"),), None)
        except ValueError as error:
            callback((), error)


class Replicas:
    """The targets of a client, each with a connection for one kind of calls; to be used on one event loop."""

    def __init__(self, targets: Sequence[str], tls: Tls | Insecure | None) -> None:
        """Begins with the first target."""
        self._replicas = deque(Replica(target, tls, is_alone=len(targets) == 1) for target in targets)
        self.has_tls = any(tls_for(target, tls) for target in targets)
        self._is_closed = False
        self.call_count = 0  # of calls under way, as their owner counts them

    async def next(self) -> Replica:
        """Returns the next replica that is ready; or else the next one, so that the call itself says what is wrong.

        Raises:
            TryAgainError: UNREACHABLE: the connections were closed.
        """
        for replica in tuple(self._replicas):  # other calls turn the order meanwhile
            if not self._is_closed:
                await replica.renew()
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
