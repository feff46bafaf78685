"""A server of the contract that answers from a script: what a syncer may say, and how its streams may break.

It speaks gRPC over a real socket; only what it says is made up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from skerry.v1 import exchange_pb2, exchange_pb2_grpc, runs_pb2, runs_pb2_grpc
from skerry.v1 import types_pb2 as v1


@dataclass(frozen=True)
class Refusal:
    """An error that ends a call."""

    code: grpc.StatusCode
    reason: str
    message: str
    retry_after_s: float | None = None


WatchStep = v1.Event | Refusal


@dataclass
class Script:
    """What the server holds, what its watch streams say one after another, and what was asked of it."""

    runs: dict[str, v1.Run] = field(default_factory=dict)
    learners: list[v1.LearnerStatus] = field(default_factory=list)
    watches: list[Sequence[WatchStep] | Refusal] = field(default_factory=list)
    asked: list[Any] = field(default_factory=list)
    progress: list[runs_pb2.RollBackProgress] = field(default_factory=list)  # of a roll-back, before it is done

    def run(self, name: str, context: grpc.ServicerContext) -> v1.Run:
        """Returns a run, or ends the call as the contract says."""
        if name not in self.runs:
            abort(context, Refusal(grpc.StatusCode.NOT_FOUND, "RUN_NOT_FOUND", f"no such run. name={name}"))
        return self.runs[name]


class ScriptedRuns(runs_pb2_grpc.RunsServicer):
    """The service Runs, from a script."""

    def __init__(self, script: Script) -> None:
        self._script = script

    def GetRun(self, request: runs_pb2.GetRunRequest, context: grpc.ServicerContext) -> runs_pb2.GetRunResponse:
        self._script.asked.append(request)
        return runs_pb2.GetRunResponse(run=self._script.run(request.name, context), learners=self._script.learners)

    def ListRuns(self, request: runs_pb2.ListRunsRequest, context: grpc.ServicerContext) -> runs_pb2.ListRunsResponse:
        self._script.asked.append(request)
        return runs_pb2.ListRunsResponse(runs=[self._script.runs[name] for name in sorted(self._script.runs)])

    def SetPolicy(
        self, request: runs_pb2.SetPolicyRequest, context: grpc.ServicerContext
    ) -> runs_pb2.SetPolicyResponse:
        self._script.asked.append(request)
        run = self._script.run(request.name, context)
        run.policy.MergeFrom(request.policy)
        return runs_pb2.SetPolicyResponse(run=run)

    def ListVersions(
        self, request: runs_pb2.ListVersionsRequest, context: grpc.ServicerContext
    ) -> runs_pb2.ListVersionsResponse:
        self._script.asked.append(request)
        run = self._script.run(request.name, context)
        (newest,) = [one.version for one in run.versions if one.fragment == request.fragment]
        first = v1.FragmentVersion(fragment=request.fragment, version=0)
        merged = [v1.DeltaFate(learner_id="us", weight_share=1.0, staleness=1, fate=v1.FATE_MERGED)]
        second = v1.FragmentVersion(fragment=request.fragment, version=newest)
        return runs_pb2.ListVersionsResponse(
            versions=[
                runs_pb2.VersionRecord(
                    version=second,
                    position=7,
                    merged=merged,
                    update_size_bytes=1500,
                    source_version=-1,
                    participation=0.75,
                ),
                runs_pb2.VersionRecord(version=first, position=1, has_snapshot=True, source_version=-1),
            ],
            position=7,
        )

    def RollBack(self, request: runs_pb2.RollBackRequest, context: grpc.ServicerContext) -> runs_pb2.RollBackResponse:
        self._script.asked.append(request)
        run = self._script.run(request.name, context)
        if self._script.progress and request.with_progress:
            return runs_pb2.RollBackResponse(run=run, progress=self._script.progress.pop(0))
        run.position += 1
        return runs_pb2.RollBackResponse(run=run)

    def CloseRun(self, request: runs_pb2.CloseRunRequest, context: grpc.ServicerContext) -> runs_pb2.CloseRunResponse:
        self._script.asked.append(request)
        run = self._script.run(request.name, context)
        run.status = v1.RUN_STATUS_CLOSED
        return runs_pb2.CloseRunResponse(run=run)

    def DeleteRun(
        self, request: runs_pb2.DeleteRunRequest, context: grpc.ServicerContext
    ) -> runs_pb2.DeleteRunResponse:
        self._script.asked.append(request)
        del self._script.runs[request.name]
        return runs_pb2.DeleteRunResponse()


class ScriptedExchange(exchange_pb2_grpc.ExchangeServicer):
    """The service Exchange, of which observers see `Watch`, from a script; the last stream stays open."""

    def __init__(self, script: Script) -> None:
        self._script = script

    def Watch(
        self, request: exchange_pb2.WatchRequest, context: grpc.ServicerContext
    ) -> Iterator[exchange_pb2.WatchResponse]:
        self._script.asked.append(request)
        start = exchange_pb2.WatchStart(run=self._script.run(request.run, context), learners=self._script.learners)
        steps = self._script.watches.pop(0)
        if isinstance(steps, Refusal):
            abort(context, steps)
            return
        yield exchange_pb2.WatchResponse(start=start)
        for step in steps:
            if isinstance(step, Refusal):
                abort(context, step)
            else:
                yield exchange_pb2.WatchResponse(event=step)


def abort(context: grpc.ServicerContext, refusal: Refusal) -> None:
    """Ends a call with the status that the contract describes."""
    status = status_pb2.Status(code=refusal.code.value[0], message=refusal.message)
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=refusal.reason, domain="skerry"))
    if refusal.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(int(1000 * refusal.retry_after_s))
        status.details.add().Pack(retry)
    context.abort_with_status(rpc_status.to_status(status))


@contextmanager
def serving(script: Script) -> Iterator[str]:
    """Serves a script on loopback and gives its target."""
    server = grpc.server(ThreadPoolExecutor(max_workers=4))
    runs_pb2_grpc.add_RunsServicer_to_server(ScriptedRuns(script), server)  # type: ignore[abstract]  # the rest is not asked
    exchange_pb2_grpc.add_ExchangeServicer_to_server(ScriptedExchange(script), server)  # type: ignore[abstract]  # as above
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(grace=None).wait()


def small_run(name: str = "demo") -> v1.Run:
    """Returns an open run of two fragments and 6 parameters."""
    run = v1.Run(
        name=name, uid="0123456789abcdef" * 2, status=v1.RUN_STATUS_OPEN, position=9,
        tensors=[v1.Tensor(name="w", shape=[2, 2]), v1.Tensor(name="b", shape=[2])],
        fragments=[v1.Fragment(name="embedding", tensors=["w"]), v1.Fragment(name="head", tensors=["b"])],
        versions=[v1.FragmentVersion(fragment="embedding", version=3, digest=bytes(32)),
                  v1.FragmentVersion(fragment="head", version=4, digest=bytes(32))],
        policy=v1.Policy(
            inner_step_count=24, quorum_count=1, merge=v1.MERGE_RULE_RDA,
            outer=v1.OuterOptimizer(
                name="nesterov", learning_rate=0.8, momentum=0.9, schedule=v1.OUTER_SCHEDULE_CONSTANT
            ),
        ),
    )  # fmt: skip
    run.created_at.FromSeconds(1_790_000_000)
    return run


def small_learner(
    learner_id: str = "us", *, is_participating: bool = True, loss: float = 2.5, region: str = "us-east"
) -> v1.LearnerStatus:
    """Returns a live learner that has reported."""
    report = v1.LearnerReport(step_count=120, token_count=245_760, loss=loss, sent_bytes=1000)
    report.step_time.FromMilliseconds(35)
    return v1.LearnerStatus(
        learner_id=learner_id, region=region, is_live=True,
        is_participating=is_participating, report=report,
    )  # fmt: skip
