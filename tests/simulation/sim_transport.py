"""The client's seam to the network (`skerry.net.transport.Transport`) over simulated calls; keeps a record of them.

The record (`records.py`) is written where answers reach the learner, and nowhere else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from skerry.errors import RefusedError, SkerryError, TryAgainError, error_of
from skerry.net.liveness import Liveness, Vigil
from skerry.net.transport import A, Method
from skerry.v1 import capabilities_pb2, exchange_pb2
from tests.simulation.network import Call, Network
from tests.simulation.records import LearnerRecord, fates_in_answer, fates_in_news


class SimReplica:
    """A replica as one learner process calls it; see `skerry.net.liveness.Watched`."""

    def __init__(self, network: Network, learner: str, index: int) -> None:
        self.name = f"replica-{index}"
        self.life = Liveness()
        self._network, self._learner, self._index = network, learner, index
        self.calls: dict[Call, float] = {}  # and when each began

    @property
    def longest_call_s(self) -> float:
        """How long the oldest of its calls has lasted."""
        return asyncio.get_running_loop().time() - min(self.calls.values(), default=float("inf"))

    @contextmanager
    def calling(self, method: str) -> Iterator[Call]:
        """Opens a call, which is over at the end of the context."""
        call = self._network.call(self._learner, self._index, method)
        self.calls[call] = asyncio.get_running_loop().time()
        try:
            yield call
        finally:
            del self.calls[call]
            call.cancel()

    async def serves(self, *, is_fresh: bool) -> bool:
        """Returns once it has answered a small question."""
        call = self._network.call(self._learner, self._index, "GetCapabilities", may_repeat=False)
        try:
            call.send(capabilities_pb2.GetCapabilitiesRequest())
            await call.receive()
        finally:
            call.cancel()
        return True

    async def give_up(self, error: SkerryError) -> None:
        """Breaks its calls."""
        for call in list(self.calls):
            call.notice_silence()


class SimTransport:
    """One learner process's calls."""

    # Small enough that a delta of the simulation's model travels in several parts: two blocks of int4, or six numbers
    # of float32, and the headers that a part spares room for.
    part_size_bytes = 120

    def __init__(self, network: Network, record: LearnerRecord, count: Callable[[], int]) -> None:
        """Writes into `record` what it hears; `count` counts the world's events."""
        self._network = network
        self._record = record
        self._count = count
        self.replicas = [SimReplica(network, record.learner, index) for index in range(len(network.endpoints))]
        self._vigil = Vigil(self.replicas)
        self._control: int | None = None  # the replica that each connection leads to
        self._bulk: int | None = None

    async def attach(
        self, requests: AsyncIterator[exchange_pb2.AttachRequest]
    ) -> AsyncGenerator[exchange_pb2.AttachResponse, None]:
        """Opens the attach stream."""
        self._control = self._route(self._control)
        async with self._sending("Attach", self._control, self._noting(requests)) as call:
            while (response := await self._received(call)) is not None:
                for fate in fates_in_news(response):
                    self._record.note_fate(fate, self._count)
                yield response

    async def push_delta(
        self, requests: AsyncIterator[exchange_pb2.PushDeltaRequest]
    ) -> exchange_pb2.PushDeltaResponse:
        """Sends a push and returns its answer."""
        self._bulk = self._route(self._bulk)
        async with self._sending("PushDelta", self._bulk, self._noting(requests)) as call:
            response: exchange_pb2.PushDeltaResponse = await self._received(call, unknown=TryAgainError)
            self.note_state(response)
            return response

    async def pull_fragment(
        self, request: exchange_pb2.PullFragmentRequest
    ) -> AsyncGenerator[exchange_pb2.PullFragmentResponse, None]:
        """Opens a download."""
        self._bulk = self._route(self._bulk)
        with self._opened("PullFragment", self._bulk) as call:
            call.send(request)
            while (response := await self._received(call)) is not None:
                yield response

    async def ask(
        self, _method: Method[A], request: object, *, timeout_s: float, unknown: type[SkerryError] = RefusedError
    ) -> A:
        """Returns the answer to a unary call, which a request's type names; pretends that servers want small parts."""
        method = type(request).__name__.removesuffix("Request")
        self._control = self._route(self._control)
        with self._opened(method, self._control) as call:
            try:
                async with asyncio.timeout(timeout_s):
                    call.send(request)
                    answer: Any = await self._received(call, unknown=unknown)
            except TimeoutError as error:
                raise error_of("TIMEOUT", f"no answer in time. method={method}") from error
        if isinstance(answer, exchange_pb2.QueryPushResponse):
            self.note_state(answer)
        if isinstance(answer, capabilities_pb2.GetCapabilitiesResponse):
            answer.suggested_part_size_bytes = self.part_size_bytes
        return answer  # type: ignore[no-any-return]  # a call's messages have no types here

    async def close(self) -> None:
        """Does nothing: calls are cancelled by who made them."""

    def _route(self, before: int | None) -> int:
        """Returns the replica for the next call: one that does not hang."""
        count, first = len(self.replicas), self._network.route(before)
        turns = [(first + turn) % count for turn in range(count)]
        return next((index for index in turns if not self.replicas[index].life.is_lost), first)

    @contextmanager
    def _opened(self, method: str, replica: int) -> Iterator[Call]:
        with self.replicas[replica].calling(method) as call:
            self._vigil.begin()
            yield call

    async def _received(self, call: Call, *, unknown: type[SkerryError] = RefusedError) -> Any:
        response = await call.receive(unknown=unknown)
        self.replicas[call.replica].life.heard()
        return response

    @asynccontextmanager
    async def _sending(self, method: str, replica: int, requests: AsyncIterator[Any]) -> AsyncGenerator[Call, None]:
        """Sends the requests beside the context; at its end the call is over."""
        with self._opened(method, replica) as call:

            async def send() -> None:
                async for request in requests:
                    await call.up.room()
                    call.send(request)
                await call.up.room()
                call.half_close()

            task = asyncio.create_task(send())
            try:
                yield call
            finally:
                task.cancel()

    # The record.

    async def _noting(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for request in requests:
            match request.WhichOneof("kind"):
                case "hello":
                    self._record.note_hello(request.hello.session_id)
                case "header":
                    self._record.note_header(request.header)
            yield request

    def note_state(self, response: exchange_pb2.PushDeltaResponse | exchange_pb2.QueryPushResponse) -> None:
        """Notes what an answer says of a push."""
        for fate in fates_in_answer(response):
            self._record.note_fate(fate, self._count)
