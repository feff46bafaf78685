"""The `Exchange` service: translates messages to calls of the domain and their results to messages."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from typing import Any, Final

from skerry.v1 import exchange_pb2 as v1
from skerry.v1 import exchange_pb2_grpc
from skerry.v1.types_pb2 import Event
from skerry.wire.layout import check_id, check_name
from skerry.wire.messages import fill
from skerry_syncer.access.caller import author, calling_learner, check_enrolled
from skerry_syncer.access.certificates import organisation_of
from skerry_syncer.access.limits import within
from skerry_syncer.errors import SyncerError, bad_request
from skerry_syncer.rpc.translate import (
    check_tensors,
    header_from_message,
    learner_messages,
    plan_message,
    report_from_message,
    run_message,
)
from skerry_syncer.run.events import EventStream, events_of, fate_message, running
from skerry_syncer.run.host import RunHost
from skerry_syncer.run.pull import PullPlan, plan_pull, resume_plan
from skerry_syncer.run.push import Push, begin_push
from skerry_syncer.run.replica import RunReplica
from skerry_syncer.store.errors import CollectedError, ObjectMissingError, UnreadableObjectError
from skerry_syncer.store.log.checkpoints import newest_state
from skerry_syncer.store.log.entries import Fate, ObjectRef, SessionItem
from skerry_syncer.store.log.fold import apply_entry
from skerry_syncer.store.log.state import FragmentState
from skerry_syncer.store.objects.interface import STREAM_CHUNK_BYTES

_PAST_BYTES: Final = 16 * 2**10  # of events in a message: those of about 30 entries, which take 10 ms to fold


class ExchangeServicer(exchange_pb2_grpc.ExchangeServicer):
    """Serves learners and observers. Holds no state, and asks the calls' contexts only who calls."""

    def __init__(self, host: RunHost) -> None:
        """Serves the runs of `host`."""
        self._host = host

    async def Attach(
        self, request_iterator: AsyncIterator[v1.AttachRequest], context: Any
    ) -> AsyncIterator[v1.AttachResponse]:
        """Joins a learner to its run for as long as the stream lives."""
        first = await anext(request_iterator, None)
        if first is None or first.WhichOneof("kind") != "hello":
            raise bad_request("the first message must be hello")
        hello = first.hello
        check_name(hello.learner_id, "learner")
        if hello.region:
            check_name(hello.region, "region")
        check_id(hello.session_id, "session id")
        replica = await self._host.open(hello.run, hello.run_uid, seen_position=hello.seen_position)
        if hello.tensors:  # there may be many
            await self._host.workers.run(check_tensors, replica.log.spec, hello.tensors)
        check_enrolled(replica.state.policy)
        organisation = organisation_of(context) if author() else ""
        await replica.attach(SessionItem(hello.learner_id, hello.session_id, hello.region, organisation))
        with replica.attached(hello.learner_id, hello.session_id) as stream:
            yield v1.AttachResponse(attached=_attached(replica, hello.learner_id))
            async with running(self._take_reports(replica, hello, request_iterator, stream)):
                while (news := await stream.get()) is not None:
                    yield v1.AttachResponse(event=news)

    async def _take_reports(
        self, replica: RunReplica, hello: v1.Hello, requests: AsyncIterator[v1.AttachRequest], stream: EventStream
    ) -> None:
        """Takes reports until the learner leaves; an error ends the events."""
        try:
            async for request in requests:
                match request.WhichOneof("kind"):
                    case "report":
                        report = report_from_message(request.report, replica.state.fragments)
                        replica.report(hello.learner_id, hello.session_id, report)
                    case "leave":
                        await replica.leave(hello.learner_id, hello.session_id)
                        break
                    case kind:
                        raise bad_request(f"only report and leave may follow hello. kind={kind}")
            stream.end()
        except Exception as error:  # noqa: BLE001 - `stream.get` raises it in the call, where the interceptor sees it
            stream.end(error)

    async def PushDelta(
        self, request_iterator: AsyncIterator[v1.PushDeltaRequest], context: Any
    ) -> v1.PushDeltaResponse:
        """Receives a delta, or some of its parts."""
        first = await anext(request_iterator, None)
        if first is None or first.WhichOneof("kind") != "header":
            raise bad_request("the first message must be header")
        header = first.header
        check_id(header.run_uid, "run uid")
        replica = await self._host.open(header.run, header.run_uid, seen_position=header.seen_position)
        check_enrolled(replica.state.policy)  # it may have attached before the run said whom it takes
        push = await begin_push(replica, header_from_message(header), self._host.budget, _client(context))
        is_repeated = push.known is not None
        try:
            while (request := await self._next(push, request_iterator)) is not None:
                match request.WhichOneof("kind"):
                    case "part" | "data" | "part_end" if is_repeated:
                        continue  # its bytes are durable
                    case "part":
                        await push.begin_part(request.part.first, request.part.numel, request.part.size_bytes)
                    case "data":
                        await push.feed(request.data)
                    case "part_end":
                        await push.end_part(request.part_end.digest)
                    case "complete":
                        await push.complete(request.complete.digest)
                        break
                    case kind:
                        raise bad_request(f"only part, data, part_end and complete may follow header. kind={kind}")
            await push.all_stored()
        finally:
            await push.abandon()
        delta = push.known
        return v1.PushDeltaResponse(
            state=v1.PUSH_STATE_ACCEPTED if delta else v1.PUSH_STATE_PARTS_STORED,
            fate=None if delta is None else fate_message(delta),
            position=replica.state.position,
        )

    async def _next(self, push: Push, requests: AsyncIterator[v1.PushDeltaRequest]) -> v1.PushDeltaRequest | None:
        """Returns the next message, or None at the end.

        Raises:
            SyncerError: TOO_SLOW.
        """
        began_s = self._host.clock.monotonic_s()
        message = "the push came too slowly; ask QueryPush which parts are durable, and send the rest in smaller ones"
        try:
            async with within(push.patience_s, message):
                return await anext(requests, None)
        finally:
            push.waited(self._host.clock.monotonic_s() - began_s)

    async def QueryPush(self, request: v1.QueryPushRequest, context: Any) -> v1.QueryPushResponse:
        """Returns which parts are durable and the delta's fate."""
        check_id(request.run_uid, "run uid")
        check_id(request.delta_id, "delta id")
        replica = await self._host.open(request.run, request.run_uid, seen_position=request.seen_position)
        replica.fragment(request.fragment)  # refused if the run has none of that name
        if request.delta_id not in replica.state.deltas:
            await replica.log.tail()
        delta = replica.state.deltas.get(request.delta_id)
        parts = [] if delta else await replica.blobs.list_parts(request.fragment, request.delta_id)
        unaccepted = v1.PUSH_STATE_PARTS_STORED if parts else v1.PUSH_STATE_UNSPECIFIED
        return v1.QueryPushResponse(
            state=v1.PUSH_STATE_ACCEPTED if delta else unaccepted,
            fate=None if delta is None else fate_message(delta),
            parts=[
                v1.StoredPart(first=part.ref.first, numel=part.ref.numel, digest=bytes.fromhex(part.ref.digest))
                for part in parts
            ],
            position=replica.state.position,
        )

    async def PullFragment(
        self, request: v1.PullFragmentRequest, context: Any
    ) -> AsyncIterator[v1.PullFragmentResponse]:
        """Sends a plan and then the bytes of its objects."""
        replica = await self._host.open(request.run, request.run_uid, seen_position=request.seen_position)
        fragment = replica.fragment(request.fragment)
        plan = await _plan(replica, fragment, request)
        begin = request.resume  # or the first byte
        yield v1.PullFragmentResponse(plan=plan_message(fragment, plan, replica.state.position))
        left = request.limit_bytes or plan.size_bytes
        for index in range(begin.object_index, len(plan.objects)):
            if not left:
                return
            offset = begin.offset if index == begin.object_index else 0
            ref, blobs = plan.objects[index].ref, replica.blobs
            try:
                read = blobs.read(ref, offset=offset) if offset else blobs.read_checked(ref)
                async with aclosing(read), aclosing(self._held(read, ref, _client(context))) as pieces:
                    async for piece in pieces:
                        data = piece[:left]
                        response = v1.PullFragmentResponse()  # filled in place: a message in a message is copied
                        message = response.data
                        message.object_index, message.offset, message.data = index, offset, data
                        yield response
                        offset, left = offset + len(data), left - len(data)
                        if not left and offset < ref.size_bytes:  # at its end, it is checked
                            return
            except (ObjectMissingError, UnreadableObjectError) as error:
                if not isinstance(error, CollectedError):
                    blobs.unreadable.add(ref.name)  # the next plan goes around it
                await replica.log.tail()
                raise SyncerError("PLAN_EXPIRED", f"an object of the plan can't be read; ask anew. {error}") from error

    async def _held(self, pieces: AsyncIterator[bytes], ref: ObjectRef, client: str) -> AsyncGenerator[bytes, None]:
        """Yields an object's pieces. Each is read once the one before was sent and the budget has room for another."""
        most_bytes = min(STREAM_CHUNK_BYTES, ref.size_bytes)
        while True:
            await self._host.budget.reserve(client, most_bytes)
            try:
                piece = await anext(pieces, None)
                if piece is None:
                    return
                yield piece
            finally:
                self._host.budget.release(client, most_bytes)

    async def Watch(self, request: v1.WatchRequest, context: Any) -> AsyncIterator[v1.WatchResponse]:
        """Follows a run as an observer."""
        replica = await self._host.open(request.run, request.run_uid, seen_position=request.after_position)
        if await replica.is_draft():  # it would stay in memory for as long as somebody follows it
            raise SyncerError("RUN_DRAFT", "the run is a draft; watch it once it is committed")
        with replica.followers.following(caller=calling_learner()) as stream:
            learners = learner_messages(replica.state, replica.view())
            yield v1.WatchResponse(start=v1.WatchStart(run=run_message(replica.state), learners=learners))
            if request.after_position >= 1:
                async for events in self._past(replica, request.after_position):
                    yield v1.WatchResponse(events=events)
                    stream.skip()  # however long the past takes: it has what comes meanwhile
                stream.skip()
                now = [status for status in learner_messages(replica.state, replica.view()) if status not in learners]
                position = replica.state.position  # the last entry may have no event
                ended = [*(Event(position=position, learner=status) for status in now), Event(position=position)]
                yield v1.WatchResponse(events=ended)
            while (news := await stream.get()) is not None:
                yield v1.WatchResponse(events=[news])

    async def _past(self, replica: RunReplica, after: int) -> AsyncIterator[list[Event]]:
        """Yields the events of the entries after `after`, by folding the log again from the checkpoint before.

        It ends when it has told of all that the replica has folded, with nothing awaited in between.
        """
        state = await newest_state(replica.log.objects, replica.log.spec, at_most=after)
        told: list[Event] = []
        size_bytes = 0
        while state.position < (until := replica.state.position):
            async for entry, data in replica.log.entries(state.position + 1, until + 1):
                outcomes = apply_entry(state, entry, data)
                for event in events_of(state, entry, outcomes) if entry.position > after else ():
                    told.append(event)
                    size_bytes += event.ByteSize()
                    if size_bytes > _PAST_BYTES:
                        yield told
                        told, size_bytes = [], 0
            if told:
                yield told
                told, size_bytes = [], 0


def _client(context: Any) -> str:
    """Returns who calls: its identity, or without roles its connection."""
    return author() or str(context.peer())


def _attached(replica: RunReplica, learner: str) -> v1.Attached:
    state = replica.state
    pending = [delta for delta in state.deltas.values() if delta.fate is Fate.PENDING and delta.item.learner == learner]
    attached = v1.Attached(run=run_message(state), pending=map(fate_message, pending))
    attached.run_step_count, attached.run_token_count = state.step_count, state.token_count
    return fill(attached, {"lease_term_s": state.policy.lease_term_s})


async def _plan(replica: RunReplica, fragment: FragmentState, request: v1.PullFragmentRequest) -> PullPlan:
    """Returns the plan; looks at the log's end before it says that there is none."""
    if request.from_version < -1 or request.target_version < 0 or request.limit_bytes < 0:
        facts = f"target_version={request.target_version}, limit_bytes={request.limit_bytes}"
        raise bad_request(f"a number is too small. from_version={request.from_version}, {facts}")
    target = fragment.version if request.is_newest and not request.HasField("resume") else request.target_version
    if max(target, request.from_version) not in fragment.versions:
        await replica.log.tail()
        if request.is_newest and not request.HasField("resume"):
            target = fragment.version
    if request.from_version > fragment.version:
        raise SyncerError(
            "VERSION_NOT_FOUND",
            f"from_version does not exist. from_version={request.from_version}, newest={fragment.version}",
        )
    if not request.HasField("resume"):
        return _new_plan(replica, fragment, request.from_version, target)
    resume, gone = request.resume, replica.state.condemned | replica.blobs.unreadable
    plan = resume_plan(fragment, gone, resume.objects, from_version=request.from_version, target_version=target)
    sizes = [planned.ref.size_bytes for planned in plan.objects]
    if not (0 <= resume.object_index <= len(sizes) and 0 <= resume.offset <= (*sizes, 0)[resume.object_index]):
        raise bad_request(f"resume is outside its plan. object_index={resume.object_index}, offset={resume.offset}")
    return plan


def _new_plan(replica: RunReplica, fragment: FragmentState, from_version: int, target: int) -> PullPlan:
    """Returns a plan of objects that can be read.

    Raises:
        SyncerError: VERSION_NOT_FOUND.
        UnreadableObjectError: there is no such plan. The next call tries all objects again.
    """
    condemned, unreadable = replica.state.condemned, replica.blobs.unreadable
    if unreadable:
        with suppress(SyncerError):
            return plan_pull(fragment, condemned | unreadable, from_version=from_version, target_version=target)
    plan = plan_pull(fragment, condemned, from_version=from_version, target_version=target)
    damaged = unreadable.intersection(planned.ref.name for planned in plan.objects)
    if damaged:
        unreadable -= damaged
        raise UnreadableObjectError(min(damaged), f"no other way to the version. version={target}")
    return plan
