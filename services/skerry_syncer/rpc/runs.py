"""The `Runs` service: translates messages to calls of the domain and their results to messages."""

from __future__ import annotations

import asyncio
from difflib import get_close_matches
from typing import Any, Final

from skerry.runtime.logs import get_logger
from skerry.v1 import runs_pb2, runs_pb2_grpc, types_pb2
from skerry.wire.layout import BadNameError, FragmentLayout, check_id, check_name
from skerry.wire.messages import layouts_from_messages, policy_from_message, unpack_layout, untrained_from_messages
from skerry.wire.policy import Policy
from skerry.wire.untrained import UntrainedTensor
from skerry_syncer.access.caller import author, only_run
from skerry_syncer.errors import SyncerError, bad_request
from skerry_syncer.rpc.translate import (
    contribution_messages,
    fitting,
    learner_messages,
    run_message,
    version_record,
)
from skerry_syncer.run.events import report_message
from skerry_syncer.run.host import RunHost
from skerry_syncer.run.lifecycle import (
    close_run,
    commit_run,
    create_run,
    delete_run,
    report_metrics,
    set_ejection,
    set_policy,
    uid_of_draft,
)
from skerry_syncer.run.replica import RunReplica
from skerry_syncer.store.errors import LogCorruptError, NewerFormatError
from skerry_syncer.store.log.entries import RunSpec

_LOG: Final = get_logger(__name__)
_PAGE_SIZE: Final = 100
_MAX_PAGE_SIZE: Final = 1000
# Tensors and fragments of one run, packed if need be. Answers carry them beside the versions' digests, in one message.
_MAX_LAYOUT_BYTES: Final = 3 * 2**20
# Reports of judges in an answer about a run: at most a fifth of a mebibyte.
_SHOWN_REPORTS: Final = 64
# Of contributions, beside all else that an answer about a run has: those of some thousand learners.
_CONTRIBUTIONS_BYTES: Final = 2**18
# A page ends before it grows past this, so that it fits into one message.
_PAGE_BYTES: Final = 2 * 2**20

# Runs of a listing that are opened at the same time.
_OPENED_AT_ONCE: Final = 4
# By difflib's ratio: two letters that were swapped in a name of three give 0.67.
_SIMILAR: Final = 0.65


class RunsServicer(runs_pb2_grpc.RunsServicer):
    """Administers runs. Holds no state, and does not use the calls' contexts."""

    def __init__(self, host: RunHost) -> None:
        """Serves the runs of `host`."""
        self._host = host

    async def CreateRun(self, request: runs_pb2.CreateRunRequest, context: Any) -> runs_pb2.CreateRunResponse:
        """Creates a draft."""
        check_name(request.name, "run")
        if request.ByteSize() > _MAX_LAYOUT_BYTES:
            raise SyncerError(
                "TOO_LARGE",
                "tensors and fragments have too many bytes: pack them, or keep a layer's experts in one tensor. "
                f"limit={_MAX_LAYOUT_BYTES}",
            )
        replica = await self._create(request)
        return runs_pb2.CreateRunResponse(run=await self._host.workers.run(run_message, replica.state))

    async def _create(self, request: runs_pb2.CreateRunRequest) -> RunReplica:
        try:
            fragments, dtypes, untrained = await self._host.workers.run(_layout_of, request)
        except BadNameError:
            raise
        except ValueError as error:
            raise SyncerError("SHAPE_MISMATCH", str(error)) from error
        try:
            policy = policy_from_message(request.policy, Policy())
        except ValueError as error:
            raise bad_request(str(error)) from error
        uid = uid_of_draft(request.name, check_id(request.request_id, "request id"))
        spec = RunSpec(request.name, uid, fragments, dtypes, self._host.clock.unix_s(), untrained)
        return await create_run(self._host, spec, request.request_id, policy)

    async def CommitRun(self, request: runs_pb2.CommitRunRequest, context: Any) -> runs_pb2.CommitRunResponse:
        """Opens a draft under its name."""
        replica = await commit_run(self._host, request.name, request.run_uid, request.seen_position)
        return runs_pb2.CommitRunResponse(run=run_message(replica.state))

    async def GetRun(self, request: runs_pb2.GetRunRequest, context: Any) -> runs_pb2.GetRunResponse:
        """Returns a run and its learners; where there is none, names runs that are called nearly so."""
        try:
            replica = await self._host.open(request.name, request.run_uid, seen_position=request.seen_position)
        except SyncerError as error:
            if error.reason != "RUN_NOT_FOUND" or only_run():  # one run's learners don't hear of others
                raise
            names = await self._host.store.objects.folders("runs")
            similar = get_close_matches(request.name, names, cutoff=_SIMILAR)
            near = [name for name, _ in await self._host.store.list_runs(similar)]
            if not near:
                raise
            message = f"{error}. runs of similar names: {', '.join(near)}"
            raise SyncerError("RUN_NOT_FOUND", message, metadata={"similar_names": " ".join(near)}) from error
        return runs_pb2.GetRunResponse(
            run=run_message(replica.state),
            learners=learner_messages(replica.state, replica.view()),
            reports=map(report_message, [*replica.state.reports.values()][-_SHOWN_REPORTS:]),
            contributions=fitting(contribution_messages(replica.state), _CONTRIBUTIONS_BYTES),
        )

    async def ListRuns(self, request: runs_pb2.ListRunsRequest, context: Any) -> runs_pb2.ListRunsResponse:
        """Lists committed runs by name; a page token is the last name of the page before."""
        count = _page_size(request.page_size)
        names = [(name, uid) for name, uid in await self._host.store.list_runs() if name > request.page_token]
        opening = asyncio.Semaphore(_OPENED_AT_ONCE)

        async def listed(name: str, uid: str) -> types_pb2.Run | None:
            async with opening:
                return await self._listed(name, uid)

        answers = await asyncio.gather(*(listed(name, uid) for name, uid in names[:count]))
        runs = [run for run in answers if run is not None]
        page = fitting(runs, _PAGE_BYTES)
        token = names[count - 1][0] if len(names) > count else ""
        if len(page) < len(runs):
            token = page[-1].name
        return runs_pb2.ListRunsResponse(runs=page, next_page_token=token)

    async def _listed(self, name: str, uid: str) -> types_pb2.Run | None:
        """Returns the run as it is now, or None where it is to be left out of a listing.

        No replica is woken by that: after a listing of many runs all of them would read the store.
        """
        try:
            replica = await self._host.open(name, uid, wakes=False)
            await replica.log.tail()
        except (SyncerError, LogCorruptError, NewerFormatError) as error:
            if error.reason == "DRAINING":
                raise
            if error.reason not in {"RUN_NOT_FOUND", "RUN_REPLACED"}:  # deleted since it was listed
                _LOG.warning("run is left out of a listing", run=name, uid=uid, cause=str(error))
            return None
        return run_message(replica.state)

    async def SetPolicy(self, request: runs_pb2.SetPolicyRequest, context: Any) -> runs_pb2.SetPolicyResponse:
        """Changes the policy."""
        replica = await self._host.open(request.name, request.run_uid, seen_position=request.seen_position)
        await set_policy(replica, request.request_id, lambda policy: policy_from_message(request.policy, policy))
        return runs_pb2.SetPolicyResponse(run=run_message(replica.state))

    async def SetEjection(self, request: runs_pb2.SetEjectionRequest, context: Any) -> runs_pb2.SetEjectionResponse:
        """Ejects or readmits a learner."""
        replica = await self._host.open(request.name, request.run_uid, seen_position=request.seen_position)
        known = await set_ejection(replica, request.request_id, request.learner_id, is_ejected=request.is_ejected)
        return runs_pb2.SetEjectionResponse(run=run_message(replica.state), learner=replica.learner_status(known))

    async def ReportMetrics(
        self, request: runs_pb2.ReportMetricsRequest, context: Any
    ) -> runs_pb2.ReportMetricsResponse:
        """Records what a judge reports."""
        replica = await self._host.open(request.name, request.run_uid, seen_position=request.seen_position)
        report = await report_metrics(
            replica, request.request_id, request.position, judge=request.judge, metrics=request.metrics
        )
        return runs_pb2.ReportMetricsResponse(report=report_message(report))

    async def ListVersions(self, request: runs_pb2.ListVersionsRequest, context: Any) -> runs_pb2.ListVersionsResponse:
        """Lists versions of a fragment, newest first."""
        count = _page_size(request.page_size)
        replica = await self._host.open(request.name, request.run_uid, seen_position=request.seen_position)
        fragment = replica.fragment(request.fragment)
        before = request.before_version or fragment.version + 1
        numbers = sorted((number for number in fragment.versions if number < before), reverse=True)[:count]
        records = (version_record(replica.state, fragment, fragment.versions[number]) for number in numbers)
        versions = fitting(records, _PAGE_BYTES)
        return runs_pb2.ListVersionsResponse(versions=versions, position=replica.state.position)

    async def RollBack(self, request: runs_pb2.RollBackRequest, context: Any) -> runs_pb2.RollBackResponse:
        """Gives every fragment its next version with older content, or says how far that is."""
        replica = await self._host.open(request.name, request.run_uid, seen_position=request.seen_position)
        progress = await replica.roll_backs.roll_back(request.request_id, request.target_position, author())
        answer = runs_pb2.RollBackResponse(run=run_message(replica.state))
        if progress is not None:
            answer.progress.stored_count, answer.progress.fragment_count = progress
        return answer

    async def CloseRun(self, request: runs_pb2.CloseRunRequest, context: Any) -> runs_pb2.CloseRunResponse:
        """Ends a run, and answers when it is closed."""
        replica = await self._host.open(request.name, request.run_uid, seen_position=request.seen_position)
        await close_run(replica)
        return runs_pb2.CloseRunResponse(run=run_message(replica.state))

    async def DeleteRun(self, request: runs_pb2.DeleteRunRequest, context: Any) -> runs_pb2.DeleteRunResponse:
        """Removes the run's name."""
        await delete_run(self._host, request.name, request.run_uid)
        return runs_pb2.DeleteRunResponse()


def _layout_of(
    request: runs_pb2.CreateRunRequest,
) -> tuple[tuple[FragmentLayout, ...], dict[str, str], tuple[UntrainedTensor, ...]]:
    """Returns the fragments, the element types by tensor name, and what else the model has.

    Raises:
        ValueError: they are not legal.
    """
    unpack_layout(request)
    layouts, dtypes = layouts_from_messages(request.tensors, request.fragments)
    return layouts, dtypes, untrained_from_messages(request.untrained)


def _page_size(asked: int) -> int:
    if asked < 0 or asked > _MAX_PAGE_SIZE:
        raise bad_request(f"page_size must be 0 to {_MAX_PAGE_SIZE}. page_size={asked}")
    return asked or _PAGE_SIZE
