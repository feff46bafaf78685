"""The client's seam to the network (`skerry.client.transport.Transport`) over simulated calls; keeps a record of them.

The record is what the auditor holds the log against: it is written where answers reach the learner, and nowhere else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from skerry.client.errors import RefusedError, SkerryError, TryAgainError, error_of
from skerry.v1 import capabilities_pb2, exchange_pb2, runs_pb2, types_pb2
from skerry.wire.codecs import Codec
from tests.simulation.network import Call, Network

# So small that a part holds one block, and a delta of the simulation's model travels in several.
_PART_SIZE_BYTES: Final = 24
# As many elements of a codec without blocks, which are not compressed: a block's, and the headers that are spared.
_EXACT_PART_SIZE_BYTES: Final = 160


@dataclass(eq=False)
class LearnerRecord:
    """What one process of a learner trained, sent and heard; none of it is read from the log."""

    learner: str
    incarnation: int
    session: str = ""
    # Sum of all steps' vectors up to step n, by tensor: [n] is (numel,) float64; [0] is zero.
    work: dict[str, list[NDArray[np.float64]]] = field(default_factory=dict)
    step_count: int = 0
    headers: dict[str, exchange_pb2.PushHeader] = field(default_factory=dict)  # by delta: as first pushed
    acknowledged: dict[str, int] = field(default_factory=dict)  # delta -> count of events when it was heard
    fates: dict[str, types_pb2.DeltaFate] = field(default_factory=dict)  # the last that was heard
    is_newest: bool = True
    has_left: bool = False
    has_flushed: bool = False  # before it left: everything that it trained was acknowledged
    is_dirty: bool = False  # its weights were poisoned, so contents are not checked
    may_be_fenced: bool = False  # the learner has had several sessions, and an old one's hello may come late
    failure: SkerryError | None = None
    longest_stall_s: float = 0.0
    steps_when_calm: int | None = None  # trained when the faults stopped
    contradictions: list[str] = field(default_factory=list)


class SimTransport:
    """One learner process's calls."""

    def __init__(
        self, network: Network, record: LearnerRecord, count: Callable[[], int], *, codec: Codec = Codec.INT4
    ) -> None:
        """Writes into `record` what it hears; `count` counts the world's events, `codec` is that of its deltas."""
        self._network = network
        self._record = record
        self._count = count
        self._codec = codec
        self._control: int | None = None  # the replica that each connection leads to
        self._bulk: int | None = None

    async def attach(
        self, requests: AsyncIterator[exchange_pb2.AttachRequest]
    ) -> AsyncGenerator[exchange_pb2.AttachResponse, None]:
        """Opens the attach stream."""
        self._control = self._network.route(self._control)
        async with _sending(self._open("Attach", self._control), self._noting_hello(requests)) as call:
            while (response := await call.receive()) is not None:
                self._note_news(response)
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
        answer.suggested_part_size_bytes = _PART_SIZE_BYTES if self._codec.has_blocks else _EXACT_PART_SIZE_BYTES
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
                self._record.may_be_fenced |= self._record.session not in ("", request.hello.session_id)
                self._record.session = request.hello.session_id
            yield request

    async def _noting_header(
        self, requests: AsyncIterator[exchange_pb2.PushDeltaRequest]
    ) -> AsyncIterator[exchange_pb2.PushDeltaRequest]:
        async for request in requests:
            if request.WhichOneof("kind") == "header" and request.header.base_version >= 0:
                self._record.headers.setdefault(request.header.delta_id, request.header)
            yield request

    def note_state(self, response: exchange_pb2.PushDeltaResponse | exchange_pb2.QueryPushResponse) -> None:
        """Notes what an answer says of a push."""
        if response.state == exchange_pb2.PUSH_STATE_ACCEPTED:
            self._note_fate(response.fate)

    def _note_news(self, response: exchange_pb2.AttachResponse) -> None:
        if response.HasField("attached"):
            for fate in response.attached.pending:
                self._note_fate(fate)
            return
        event = response.event
        match event.WhichOneof("kind"):
            case "delta_accepted":
                self._note_fate(event.delta_accepted)
            case "version_committed":
                for fate in event.version_committed.merged:
                    self._note_fate(fate)
            case "fates_decided":
                for fate in event.fates_decided.fates:
                    self._note_fate(fate)

    def _note_fate(self, fate: types_pb2.DeltaFate) -> None:
        record = self._record
        if fate.delta_id not in record.headers:
            return
        record.acknowledged.setdefault(fate.delta_id, self._count())
        known = record.fates.get(fate.delta_id)
        if known is not None and types_pb2.FATE_PENDING not in {known.fate, fate.fate}:
            if (known.fate, known.version) != (fate.fate, fate.version):
                record.contradictions.append(f"two final fates of one delta were heard. delta={fate.delta_id}")
            return
        if known is None or known.fate == types_pb2.FATE_PENDING:
            record.fates[fate.delta_id] = fate


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
