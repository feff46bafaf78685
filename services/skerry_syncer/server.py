"""Builds one syncer process from store, host, services, health and reflection; starts, drains and stops it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from skerry.net.retry import Retry, RetrySettings
from skerry.net.tls import Tls
from skerry.runtime.clock import SystemClock
from skerry.runtime.exposition import exposed
from skerry.runtime.identifiers import Entropy, SystemEntropy
from skerry.runtime.logs import get_logger
from skerry.runtime.otlp import OtlpSettings, exported
from skerry.runtime.workers import ThreadWorkers
from skerry.v1 import capabilities_pb2, capabilities_pb2_grpc, exchange_pb2, exchange_pb2_grpc, runs_pb2, runs_pb2_grpc
from skerry_syncer.access.certificates import server_credentials
from skerry_syncer.access.deny_list import DenyList
from skerry_syncer.access.limits import MAX_MESSAGE_BYTES, MAX_STREAMS
from skerry_syncer.rpc.capabilities import CapabilitiesServicer
from skerry_syncer.rpc.exchange import ExchangeServicer
from skerry_syncer.rpc.health import HealthServicer
from skerry_syncer.rpc.interceptor import Interceptor
from skerry_syncer.rpc.runs import RunsServicer
from skerry_syncer.run.events import running
from skerry_syncer.run.host import HostSettings, RunHost
from skerry_syncer.run.metrics import MeasuredObjects, OnLoop, SyncerMetrics
from skerry_syncer.store.errors import StoreRefusedError, StoreUnavailableError
from skerry_syncer.store.objects.interface import Objects
from skerry_syncer.store.objects.put_if_absent import check_put_if_absent
from skerry_syncer.store.store import Store
from skerry_syncer.store.versions.scratch import Scratch, memory_share_bytes

_LOG: Final = get_logger(__name__)
T = TypeVar("T")
# Time that calls in flight have at least to end, however much of the grace the merges used.
_LEAST_STOP_S: Final = 0.2
_STORE_RETRIES: Final = RetrySettings(attempt_count=None, first_wait_s=0.5, longest_wait_s=10.0)

_OPTIONS: Final[Sequence[tuple[str, int]]] = (
    # Above the contract's limit, which the interceptor checks, because a refusal by gRPC itself has no details.
    ("grpc.max_receive_message_length", 2 * MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # gRPC inflates compressed messages before the caller is authenticated, without a limit: 0.3 MB became 300 MiB. The
    # first option refuses such calls, the second keeps gRPC from inflating any. Weights are compressed in frames.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.per_message_decompression", 0),
    # Detect half-open connections within a minute, and allow clients to ping every ten seconds.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 15_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    # Without a bound, streams that are reset faster than they are refused take memory without end.
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    # How much of a call gRPC receives before the syncer reads it. By default a fast client can send 128 MiB in each.
    # 2 MiB beside the message that is being read is what a TCP connection carries in a round trip.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 2**21),
    # A connection without a handshake, or without a call for a while, is closed to make room. Clients connect again.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 300_000),
    # With port reuse, two servers on one port would each get half of the calls, without an error.
    ("grpc.so_reuseport", 0),
)
# How long calls in flight may go on once a connection has reached its age; learners then resume them.
_CONNECTION_GRACE_MS: Final = 60_000
_SERVICES: Final = (
    capabilities_pb2.DESCRIPTOR.services_by_name["Capabilities"].full_name,
    exchange_pb2.DESCRIPTOR.services_by_name["Exchange"].full_name,
    runs_pb2.DESCRIPTOR.services_by_name["Runs"].full_name,
)


@dataclass(frozen=True)
class ServerSettings:
    """How one syncer process is configured."""

    listen: str = "127.0.0.1:50051"  # port 0: any free one
    tls: Tls | None = None  # with `ca`: clients need a certificate of that authority, and have roles; None: plain text
    # How long a TLS connection lives. A client whose certificate is no longer valid is disconnected by then.
    tls_connection_age_s: float = 3600.0
    deny_list: DenyList | None = None  # of clients that are refused; only with roles
    has_open_health: bool = True  # clients without an identity get answers of health; else only with roles
    has_reflection: bool = True
    metrics: str | None = None  # where Prometheus asks, likewise; None: nowhere
    otlp: OtlpSettings | None = None  # how metrics are sent to an OpenTelemetry collector; None: not at all
    drain_grace_s: float = 20.0
    worker_count: int = 2
    scratch_directory: Path | None = None  # None: in memory
    host: HostSettings = field(default_factory=HostSettings)


@dataclass(frozen=True)
class SyncerServer:
    """A syncer that is listening; created by `serving`."""

    port: int
    metrics_url: str  # empty: nowhere
    host: RunHost
    _server: grpc.aio.Server
    _health: HealthServicer

    async def drain(self, grace_s: float) -> None:
        """Shuts down without losing work; returns when the last call has ended, or after `grace_s`.

        Health changes to NOT_SERVING first. Then followers are told and their streams end, no further round is closed,
        and merges end or are left to another replica. Pushes in flight end, or are resumed on another replica from
        their last whole part.
        """
        started_s = self.host.clock.monotonic_s()
        _LOG.info("draining", grace_s=grace_s)
        self._health.is_draining.set()
        await self.host.drain(grace_s)
        self._health.has_ended.set()
        left_s = max(_LEAST_STOP_S, grace_s - (self.host.clock.monotonic_s() - started_s))
        await self._server.stop(left_s)
        _LOG.info("drained", drain_s=round(self.host.clock.monotonic_s() - started_s, 3))


@asynccontextmanager
async def serving(objects: Objects, settings: ServerSettings) -> AsyncIterator[SyncerServer]:
    """Yields a syncer that listens on `settings.listen`, and stops it at the end of the context.

    It begins to listen once the store has answered.

    Raises:
        OSError: it can't listen on that address, or on that of the metrics.
        StoreRefusedError: the store refuses the credentials, or has no such bucket.
        StoreURLError: no syncer can work with such a store.
        ValueError: the files of `settings.tls` can't be used.
    """
    clock, entropy, workers = SystemClock(), SystemEntropy(), ThreadWorkers(settings.worker_count)
    await _wait_for(objects, entropy)
    metrics = SyncerMetrics(clock)
    objects = MeasuredObjects(objects, metrics)
    store = Store(objects, clock=clock, entropy=entropy, workers=workers, writer=f"syncer-{entropy.hex_id()[:8]}")
    host = RunHost(
        store,
        scratch=Scratch(settings.scratch_directory, memory_bytes=memory_share_bytes()),
        settings=settings.host,
        metrics=metrics,
    )
    has_roles = settings.tls is not None and settings.tls.ca is not None
    interceptor = Interceptor(
        metrics, has_roles=has_roles, has_open_health=settings.has_open_health, deny_list=settings.deny_list
    )
    server = grpc.aio.server(interceptors=[interceptor], options=_options(settings))
    servicer = HealthServicer(("", *_SERVICES))
    runs_pb2_grpc.add_RunsServicer_to_server(RunsServicer(host), server)
    exchange_pb2_grpc.add_ExchangeServicer_to_server(ExchangeServicer(host), server)
    capabilities_pb2_grpc.add_CapabilitiesServicer_to_server(CapabilitiesServicer(), server)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    if settings.has_reflection:
        reflection.enable_server_reflection((*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    try:
        if settings.tls is None:
            port = server.add_insecure_port(settings.listen)
        else:
            port = server.add_secure_port(settings.listen, server_credentials(settings.tls, clock))
    except RuntimeError as error:
        raise OSError(f"can't listen on the address. listen={settings.listen}") from error
    try:
        on_loop = OnLoop(metrics.registry)
        exposing = exposed(on_loop, settings.metrics) if settings.metrics else nullcontext("")
        exporting = exported(on_loop, settings.otlp, service="skerry")
        async with running(metrics.watch_lag()), host.serving(), _beside(exporting), _beside(exposing) as metrics_url:
            await server.start()
            try:
                yield SyncerServer(port, metrics_url, host, server, servicer)
            finally:
                await server.stop(None)
    finally:
        await store.close()
        await asyncio.to_thread(workers.close)


@asynccontextmanager
async def _beside(context: AbstractContextManager[T]) -> AsyncIterator[T]:
    """Enters and leaves a context on a thread, where it may wait for what the loop has to do."""
    value = await asyncio.to_thread(context.__enter__)
    try:
        yield value
    finally:
        await asyncio.to_thread(context.__exit__, None, None, None)


async def _wait_for(objects: Objects, entropy: Entropy) -> None:
    """Returns when the store has passed its checks; logs what is wrong while it can't be reached."""

    def is_away(error: BaseException) -> bool:
        return isinstance(error, StoreUnavailableError) and not isinstance(error, StoreRefusedError)

    def warn(attempt: int, error: BaseException) -> None:
        _LOG.warning("not listening yet: the store does not answer", attempt=attempt, cause=str(error))

    retry = Retry(_STORE_RETRIES, random.Random(entropy.hex_id()), is_away, before_pause=warn)
    await retry.call(partial(check_put_if_absent, objects, entropy))


def _options(settings: ServerSettings) -> list[tuple[str, int]]:
    if settings.tls is None:
        return [*_OPTIONS]
    age_ms = ("grpc.max_connection_age_ms", int(1e3 * settings.tls_connection_age_s))
    return [*_OPTIONS, age_ms, ("grpc.max_connection_age_grace_ms", _CONNECTION_GRACE_MS)]
