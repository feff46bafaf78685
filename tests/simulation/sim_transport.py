"""The client's seam to the network (`skerry.client.transport.Transport`) over simulated calls; keeps a record of them.

The record (`records.py`) is written where answers reach the learner, and nowhere else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from skerry.client.errors import RefusedError, SkerryError, TryAgainError, error_of
from skerry.v1 import capabilities_pb2, exchange_pb2, runs_pb2
from tests.simulation.network import Call, Network
from tests.simulation.records import LearnerRecord, fates_in_answer, fates_in_news

# Small enough that a delta of the simulation's model travels in several parts: two blocks of int4, or six numbers of
# float32, and the headers that a part spares room for.
_PART_SIZE_BYTES: Final = 120


class SimTransport:
    """One learner process's calls."""

    def __init__(self, network: Network, record: LearnerRecord, count: Callable[[], int]) -> None:
        """Writes into `record` what it hears; `count` counts the world's events."""
        self._network = network
        self._record = record
        self._count = count
        self._control: int | None = None  # the replica that each connection leads to
        self._bulk: int | None = None

    async def attach(
        self, requests: AsyncIterator[exchange_pb2.AttachRequest]
    ) -> AsyncGenerator[exchange_pb2.AttachResponse, None]:
        """Opens the attach stream."""
        self._control = self._network.route(self._control)
        async with _sending(self._open("Attach", self._control), self._noting_hello(requests)) as call:
            while (response := await call.receive()) is not None:
                for fate in fates_in_news(response):
                    self._record.note_fate(fate, self._count)
                yield response

    async def push_delta(
        self, requests: AsyncIterator[exchange_pb2.PushDeltaRequest]
    ) -> exchange_pb2.PushDeltaResponse:
        """Sends a push and returns its answer."""
        self._bulk = self._network.route(self._bulk)
        async with _sending(self._open("PushDelta", self._bulk), self._noting_header(requests)) as call:
            response: exchange_pb2.PushDeltaResponse = await call.receive(unknown=TryAgainError)
            self.note_state(response)
            return response

    async def query_push(
        self, request: exchange_pb2.QueryPushRequest, *, timeout_s: float
    ) -> exchange_pb2.QueryPushResponse:
        """Asks how far a push has come."""
        response: exchange_pb2.QueryPushResponse = await self._unary(
            "QueryPush", request, timeout_s, unknown=TryAgainError
        )
        self.note_state(response)
        return response

    async def pull_fragment(
        self, request: exchange_pb2.PullFragmentRequest
    ) -> AsyncGenerator[exchange_pb2.PullFragmentResponse, None]:
        """Opens a download."""
        self._bulk = self._network.route(self._bulk)
        call = self._open("PullFragment", self._bulk)
        try:
            call.send(request)
            while (response := await call.receive()) is not None:
                yield response
        finally:
            call.cancel()

    async def get_capabilities(
        self, request: capabilities_pb2.GetCapabilitiesRequest, *, timeout_s: float
    ) -> capabilities_pb2.GetCapabilitiesResponse:
        """Asks what the server speaks, and pretends that it wants small parts."""
        answer: capabilities_pb2.GetCapabilitiesResponse = await self._unary("GetCapabilities", request, timeout_s)
        answer.suggested_part_size_bytes = _PART_SIZE_BYTES
        return answer

    async def get_run(self, request: runs_pb2.GetRunRequest, *, timeout_s: float) -> runs_pb2.GetRunResponse:
        """Asks for a run."""
        answer: runs_pb2.GetRunResponse = await self._unary("GetRun", request, timeout_s)
        return answer

    async def create_run(self, request: runs_pb2.CreateRunRequest, *, timeout_s: float) -> runs_pb2.CreateRunResponse:
        """Makes a draft."""
        answer: runs_pb2.CreateRunResponse = await self._unary("CreateRun", request, timeout_s)
        return answer

    async def commit_run(self, request: runs_pb2.CommitRunRequest, *, timeout_s: float) -> runs_pb2.CommitRunResponse:
        """Makes a draft the run of its name."""
        answer: runs_pb2.CommitRunResponse = await self._unary("CommitRun", request, timeout_s)
        return answer

    async def roll_back(self, request: runs_pb2.RollBackRequest, *, timeout_s: float) -> runs_pb2.RollBackResponse:
        """Gives fragments older content under new versions."""
        answer: runs_pb2.RollBackResponse = await self._unary("RollBack", request, timeout_s)
        return answer

    async def set_policy(self, request: runs_pb2.SetPolicyRequest, *, timeout_s: float) -> runs_pb2.SetPolicyResponse:
        """Changes the policy."""
        answer: runs_pb2.SetPolicyResponse = await self._unary("SetPolicy", request, timeout_s)
        return answer

    async def close_run(self, request: runs_pb2.CloseRunRequest, *, timeout_s: float) -> runs_pb2.CloseRunResponse:
        """Ends a run."""
        answer: runs_pb2.CloseRunResponse = await self._unary("CloseRun", request, timeout_s)
        return answer

    async def close(self) -> None:
        """Does nothing: calls are cancelled by who made them."""

    def _open(self, method: str, replica: int) -> Call:
        return self._network.call(self._record.learner, replica, method)

    async def _unary(
        self, method: str, request: Any, timeout_s: float, *, unknown: type[SkerryError] = RefusedError
    ) -> Any:
        self._control = self._network.route(self._control)
        call = self._open(method, self._control)
        try:
            async with asyncio.timeout(timeout_s):
                call.send(request)
                return await call.receive(unknown=unknown)
        except TimeoutError as error:
            raise error_of("TIMEOUT", f"no answer in time. method={method}") from error
        finally:
            call.cancel()

    # The record.

    async def _noting_hello(
        self, requests: AsyncIterator[exchange_pb2.AttachRequest]
    ) -> AsyncIterator[exchange_pb2.AttachRequest]:
        async for request in requests:
            if request.WhichOneof("kind") == "hello":
                self._record.note_hello(request.hello.session_id)
            yield request

    async def _noting_header(
        self, requests: AsyncIterator[exchange_pb2.PushDeltaRequest]
    ) -> AsyncIterator[exchange_pb2.PushDeltaRequest]:
        async for request in requests:
            if request.WhichOneof("kind") == "header":
                self._record.note_header(request.header)
            yield request

    def note_state(self, response: exchange_pb2.PushDeltaResponse | exchange_pb2.QueryPushResponse) -> None:
        """Notes what an answer says of a push."""
        for fate in fates_in_answer(response):
            self._record.note_fate(fate, self._count)


@asynccontextmanager
async def _sending(call: Call, requests: AsyncIterator[Any]) -> AsyncGenerator[Call, None]:
    """Sends the requests beside the context; at its end the call is over."""

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
        call.cancel()
