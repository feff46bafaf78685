"""The network between learners and replicas: calls of `skerry.v1` over links that delay, block, cut and repeat.

At any message something on the way may end the call with a status of its own, and the replica may have done its work.

A call is two pipes, one each way. Within a call messages keep their order, as in an HTTP/2 stream; between calls
nothing is ordered. A lost packet is a delay or a broken call, never a missing message in the middle. A call breaks by a
reset, or when a ping stays unanswered; until then a half-open link looks fine from both ends.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import grpc
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from skerry.errors import RefusedError, SkerryError, error_of
from skerry.net.grpc_transport import error_from_rpc
from skerry_syncer.access.limits import patience_s
from skerry_syncer.errors import SyncerError
from skerry_syncer.rpc.status import status_of
from tests.simulation.processes import OUTSIDE, Process

# As the client's and server's keepalive settings make it: a ping after 30 s, given up after 20 s more.
KEEPALIVE_S: Final = 50.0
CONNECT_S: Final = 20.0
_REPEATED_CALL_S: Final = 10.0
# What keeps messages of one direction in order: timers of one moment may fire in any.
_BEHIND_S: Final = 1e-6
# What something between a learner and a replica answers by itself: a proxy, a firewall, gRPC, another service.
_CODES: Final = tuple(code for _, code in sorted(code_pb2.Code.items()) if code != code_pb2.OK)
_STREAMS: Final = frozenset({"Attach", "PullFragment"})  # OK ends these without a message
_DOMAINS: Final = ("googleapis.com", "skerry.example", "SKERRY", "")
_REASONS: Final = ("BASE_STALE", "BASE_REPEATED", "BAD_REQUEST", "NON_FINITE", "RUN_CLOSED", "SESSION_FENCED")


@dataclass(frozen=True)
class NetworkFaults:
    """What links do to messages; probabilities are per message, or per call where it says so."""

    latency_s: tuple[float, float] = (0.01, 0.08)
    resend: float = 0.0  # a packet is lost and sent again
    resend_s: tuple[float, float] = (0.2, 3.0)
    cut: float = 0.0  # the call breaks here
    lost_answer: float = 0.0  # of a call that took effect
    repeat: float = 0.0  # per call: a proxy repeats it later
    repeat_after_s: tuple[float, float] = (0.0, 40.0)
    wander: float = 0.1  # per call: another replica than the call before
    foreign: float = 0.0  # something between the two ends the call by itself here, with a status of its own


CALM_NETWORK: Final = NetworkFaults()


class _End(NamedTuple):
    """The end of a direction; with a status where it was an error."""

    status: status_pb2.Status | None


class _Broken(NamedTuple):
    """The connection is gone."""


class Link:
    """The way between one learner and one replica."""

    def __init__(self) -> None:
        """Starts unblocked."""
        self.is_blocked = False
        self.block_count = 0
        self.calls: dict[Call, None] = {}
        self._held: list[Callable[[], None]] = []

    def pass_on(self, delivery: Callable[[], None]) -> None:
        """Delivers now, or when the link is whole."""
        if self.is_blocked:
            self._held.append(delivery)
        else:
            delivery()

    def block(self) -> None:
        """Lets nothing through; what is sent waits, and calls break when a ping stays unanswered."""
        self.is_blocked = True
        self.block_count += 1

    def heal(self) -> None:
        """Lets everything through that still waits."""
        self.is_blocked = False
        held, self._held = self._held, []
        for delivery in held:
            delivery()

    def break_calls(self) -> None:
        """Breaks every call on it."""
        for call in list(self.calls):
            call.break_off()


class _Pipe:
    """One direction of one call."""

    def __init__(self, network: Network, link: Link) -> None:
        self.is_cut = False
        self._network = network
        self._link = link
        self._arrived: deque[Any] = deque()
        self._waiting: list[asyncio.Future[None]] = []
        self._last_s = 0.0
        self._under_way = 0

    def send(self, item: Any) -> None:
        """Sends an item, in order."""
        self._under_way += 1
        loop = asyncio.get_running_loop()
        self._last_s = max(self._last_s + _BEHIND_S, loop.time() + self._network.latency_s())
        loop.call_at(self._last_s, self._arrive, item, context=OUTSIDE)

    @property
    def has_room(self) -> bool:
        return self._under_way < self._network.window

    async def room(self) -> None:
        """Returns when another item may be sent."""
        while not self.has_room and not self.is_cut:
            await self._wait()
        while self.is_cut:
            await self._wait()  # what is sent into a broken call goes nowhere, and whoever sends is cancelled

    async def take(self) -> Any:
        """Returns the next item."""
        while not self._arrived:
            await self._wait()
        self._under_way -= 1
        self._wake()
        return self._arrived.popleft()

    def put(self, item: Any) -> None:
        """Has an item arrive now, past all others."""
        self._arrived.append(item)
        self._wake()

    def _arrive(self, item: Any) -> None:
        if not self.is_cut:
            self._link.pass_on(lambda: None if self.is_cut else self.put(item))

    async def _wait(self) -> None:
        news = asyncio.get_running_loop().create_future()
        self._waiting.append(news)
        await news

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for news in waiting:
            if not news.done():
                news.set_result(None)


class _Dropping(_Pipe):
    """The direction in which answers are read and dropped."""

    def send(self, item: Any) -> None:
        """Drops it."""


@dataclass(eq=False)
class Call:
    """One call from a learner to a replica."""

    network: Network
    link: Link
    replica: int
    method: str
    up: _Pipe
    down: _Pipe
    recorded: list[Any] | None = None  # requests, where the call will be repeated
    server_task: asyncio.Task[Any] | None = None
    is_served: bool = False
    is_ended_foreign: bool = False  # the client has got, or will get, a status that is not the replica's
    is_over: bool = False

    # The client's side.

    def send(self, message: Any) -> None:
        """Sends a request message."""
        if self.recorded is not None:
            self.recorded.append(message)
        if self.network.draws(self.network.faults.cut):
            self.break_off()
            return
        self.up.send(_copied(message))
        if self.network.draws(self.network.faults.foreign):
            self.end_foreign()

    def half_close(self) -> None:
        """Says that no more requests come."""
        self.up.send(_End(None))

    async def receive(self, *, unknown: type[SkerryError] = RefusedError) -> Any:
        """Returns the next response, or None at the end.

        Raises:
            SkerryError: the call failed; of the class `unknown` where the status says nothing of the call.
        """
        item = await self.down.take()
        if isinstance(item, _Broken):
            raise error_of("UNREACHABLE", f"connection was lost. method={self.method}")
        if isinstance(item, _End):
            self.network.forget(self)
            if item.status is None:
                return None
            raise _error_of(item.status, unknown)
        return item

    def cancel(self) -> None:
        """Ends a call that nobody waits for any more."""
        if self.is_over:
            return
        self.network.forget(self)
        if not self.up.is_cut:
            self.network.later(lambda: self.link.pass_on(self._cancel_server))

    # The server's side.

    async def requests(self) -> AsyncIterator[Any]:
        """Yields the request messages."""
        while not isinstance(item := await self.up.take(), _End):
            yield item

    def respond(self, message: Any, *, is_last: bool = False) -> None:
        """Sends a response message; the last one of a call may get lost with the connection."""
        faults = self.network.faults
        if self.is_ended_foreign:
            return
        if self.network.draws(faults.foreign):
            self.end_foreign()
            return
        if self.network.draws(faults.cut + (faults.lost_answer if is_last else 0.0)):
            self.break_off()
            return
        self.down.send(_copied(message))

    def finish(self, error: Exception | None) -> None:
        """Ends the call from the server's side."""
        if self.is_ended_foreign:
            return
        status = None if error is None else status_of(error)
        if status is not None and status.code == code_pb2.INTERNAL:
            self.network.defects.append(f"a call failed by a defect. method={self.method}, cause={error!r}")
        self.down.send(_End(status))

    # What the network does to it.

    def break_off(self) -> None:
        """Breaks the connection under it; both ends hear of it."""
        if self.up.is_cut:
            return
        self.network.forget(self)
        self.up.is_cut = self.down.is_cut = True
        self.network.later(lambda: self.down.put(_Broken()))
        self.network.later(self._cancel_server)

    def end_foreign(self) -> None:
        """Has a proxy, a firewall or gRPC itself answer in the replica's place, which may hear of it much later."""
        if self.up.is_cut or self.is_ended_foreign:
            return
        self.is_ended_foreign = True
        end, served_s = self.network.foreign_end(self.method)
        self.down.send(end)
        asyncio.get_running_loop().call_later(served_s, self._cancel_server, context=OUTSIDE)

    def fall_silent(self) -> None:
        """Drops everything in both directions without telling either end: a half-open connection."""
        self.up.is_cut = self.down.is_cut = True

    def notice_silence(self) -> None:
        """Has both ends find out that pings stay unanswered."""
        self.up.is_cut = False
        self.break_off()

    def _cancel_server(self) -> None:
        if self.server_task is not None:
            self.server_task.cancel()


@dataclass
class Endpoint:
    """A replica as the network sees it."""

    process: Process | None = None
    is_accepting: bool = False
    methods: dict[str, Method] = field(default_factory=dict)


@dataclass(frozen=True)
class Method:
    """A servicer's method and its shape."""

    behaviour: Callable[[Any, Any], Any]
    takes_stream: bool = False
    gives_stream: bool = False


class Network:
    """All links, and the calls on them."""

    def __init__(
        self, endpoints: list[Endpoint], faults: NetworkFaults, source: random.Random, *, window: int = 6
    ) -> None:
        """Draws every fault from `source`; `window` messages may be under way one way in a call, as in HTTP/2."""
        self.window = window
        self.endpoints = endpoints
        self.faults = faults
        self.defects: list[str] = []  # errors of methods that are defects
        self._random = source
        self._links: dict[tuple[str, int], Link] = {}

    def link(self, learner: str, replica: int) -> Link:
        """Returns the way between the two."""
        return self._links.setdefault((learner, replica), Link())

    def links(self, learner: str | None, replica: int | None) -> list[Link]:
        """Returns the links of a learner, a replica, or both; None means all."""
        return [
            link
            for (name, index), link in sorted(self._links.items())
            if learner in (None, name) and replica in (None, index)
        ]

    def draws(self, probability: float) -> bool:
        """Whether something of this probability happens now."""
        return probability > 0 and self._random.random() < probability

    def latency_s(self) -> float:
        """Returns how long one message takes."""
        faults = self.faults
        again_s = self._random.uniform(*faults.resend_s) if self.draws(faults.resend) else 0.0
        return self._random.uniform(*faults.latency_s) + again_s

    def foreign_end(self, method: str) -> tuple[_End, float]:
        """Returns how a call ends that is answered in the replica's place, and how long the replica goes on with it."""
        return _End(_foreign_status(method, self._random)), self._random.uniform(0.0, _REPEATED_CALL_S)

    def later(self, happen: Callable[[], None]) -> None:
        """Has something happen after one message's time."""
        asyncio.get_running_loop().call_later(self.latency_s(), happen, context=OUTSIDE)

    def route(self, before: int | None) -> int:
        """Returns the replica that a load balancer gives to the next call."""
        if before is None or self.draws(self.faults.wander):
            return self._random.randrange(len(self.endpoints))
        return before

    def call(self, learner: str, replica: int, method: str, *, may_repeat: bool = True) -> Call:
        """Opens a call."""
        link = self.link(learner, replica)
        call = Call(self, link, replica, method, _Pipe(self, link), _Pipe(self, link))
        if may_repeat and self.draws(self.faults.repeat):
            call.recorded = []
        link.calls[call] = None
        process = self.endpoints[replica].process
        if link.is_blocked or (process is not None and process.is_stopped):
            asyncio.get_running_loop().call_later(CONNECT_S, self._give_up_connecting, call, context=OUTSIDE)
        self.later(lambda: self._connect(call))
        return call

    def forget(self, call: Call) -> None:
        """Takes note that a call is over, as far as its client is concerned."""
        if call.is_over:
            return
        call.is_over = True
        call.link.calls.pop(call, None)
        if call.recorded:
            delay_s = self._random.uniform(*self.faults.repeat_after_s)
            asyncio.get_running_loop().call_later(delay_s, self._repeat, call, context=OUTSIDE)

    def lose(self, replica: int, *, with_reset: bool) -> None:
        """Takes note that a replica died: its host resets the connections, or is gone too."""
        for link in self.links(None, replica):
            for call in list(link.calls):
                if with_reset:
                    call.break_off()
                else:
                    self.make_half_open(call)

    def make_half_open(self, call: Call) -> None:
        """Makes a call half-open until a ping is not answered."""
        call.fall_silent()
        asyncio.get_running_loop().call_later(KEEPALIVE_S, call.notice_silence, context=OUTSIDE)

    def _connect(self, call: Call) -> None:
        endpoint = self.endpoints[call.replica]
        if call.up.is_cut:
            return
        if call.link.is_blocked:
            call.link.pass_on(lambda: self._connect(call))
        elif endpoint.process is None or not endpoint.process.is_alive or not endpoint.is_accepting:
            call.break_off()
        else:
            call.server_task = endpoint.process.start(_serve(call, endpoint.methods[call.method]))

    @staticmethod
    def _give_up_connecting(call: Call) -> None:
        if not call.is_served:
            call.break_off()

    def _repeat(self, original: Call) -> None:
        """Repeats a call that is over, as a proxy might, which drops the answers."""
        replica = self._random.randrange(len(self.endpoints))
        again = Call(self, original.link, replica, original.method, _Pipe(self, Link()), _Dropping(self, Link()))
        self.later(lambda: self._connect(again))
        for message in original.recorded or ():
            again.up.send(_copied(message))
        if self._random.random() < 0.7:
            again.half_close()
        asyncio.get_running_loop().call_later(_REPEATED_CALL_S, again.break_off, context=OUTSIDE)


async def _serve(call: Call, method: Method) -> None:
    """Answers a call as gRPC's server does: what the method raises becomes a status, a broken call a cancellation."""
    call.is_served = True
    context = SimpleNamespace(peer=lambda: call.link)  # what a method asks of it: whose call it is
    argument = call.requests() if method.takes_stream else await call.up.take()
    try:
        if method.gives_stream:
            responses = method.behaviour(argument, context)
            try:
                async for response in responses:
                    async with asyncio.timeout(patience_s(response.ByteSize())):
                        await call.down.room()
                    call.respond(response)
            except TimeoutError:
                raise SyncerError("TOO_SLOW", "the client did not read what it asked for") from None
            finally:
                await responses.aclose()
        else:
            call.respond(await method.behaviour(argument, context), is_last=True)
    except asyncio.CancelledError:
        raise
    except Exception as error:  # noqa: BLE001 - the outermost edge
        call.finish(error)
    else:
        call.finish(None)


def _copied(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


def _error_of(status: status_pb2.Status, unknown: type[SkerryError]) -> SkerryError:
    """Packs a status into trailing metadata and unpacks it again, as gRPC does."""
    packed = rpc_status.to_status(status)
    trailing = grpc.aio.Metadata(*packed.trailing_metadata)
    error = grpc.aio.AioRpcError(packed.code, grpc.aio.Metadata(), trailing, packed.details, None)
    return error_from_rpc(error, unknown=unknown)


def _foreign_status(method: str, source: random.Random) -> status_pb2.Status | None:
    """Returns any status, some with details that look like a syncer's; None for OK."""
    if method in _STREAMS and source.random() < 0.2:
        return None
    status = status_pb2.Status(code=source.choice(_CODES), message="not from a replica")
    if source.random() < 0.5:
        info = error_details_pb2.ErrorInfo(domain=source.choice(_DOMAINS), reason=source.choice(_REASONS))
        status.details.add().Pack(info)
    return status
