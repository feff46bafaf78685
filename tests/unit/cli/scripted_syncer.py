"""A server of the contract that answers from a script: what a syncer may say, and how its streams may break.

It speaks gRPC over a real socket; only what it says is made up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from skerry.v1 import exchange_pb2, exchange_pb2_grpc, runs_pb2, runs_pb2_grpc
from skerry.v1 import types_pb2 as v1

R = TypeVar("R")


@dataclass(frozen=True)
class Refusal:
    """An error that ends a call."""

    code: grpc.StatusCode
    reason: str
    message: str
    retry_after_s: float | None = None

    def abort(self, context: grpc.ServicerContext) -> None:
        """Ends a call with the status that the contract describes."""
        status = status_pb2.Status(code=self.code.value[0], message=self.message)
        status.details.add().Pack(error_details_pb2.ErrorInfo(reason=self.reason, domain="skerry"))
        if self.retry_after_s is not None:
            retry = error_details_pb2.RetryInfo()
            retry.retry_delay.FromMilliseconds(int(1000 * self.retry_after_s))
            status.details.add().Pack(retry)
        context.abort_with_status(rpc_status.to_status(status))


WatchStep = v1.Event | Refusal


class Script(runs_pb2_grpc.RunsServicer, exchange_pb2_grpc.ExchangeServicer):
    """What the server holds, what its watch streams say one after another, and what was asked of it."""

    def __init__(self, *watches: Sequence[WatchStep] | Refusal) -> None:
        self.runs = {"demo": small_run()}
        self.learners = [small_learner()]
        self.watches = list(watches)
        self.progress: list[runs_pb2.RollBackProgress] = []  # of a roll-back, before it is done
        self._asked: list[Any] = []

    def asked(self, kind: type[R]) -> list[R]:
        """Returns the requests of a kind."""
        return [request for request in self._asked if isinstance(request, kind)]

    def _run(self, request: Any, context: grpc.ServicerContext) -> v1.Run:
        """Takes note of a request and returns its run, or ends the call as the contract says."""
        self._asked.append(request)
        name = request.run if isinstance(request, exchange_pb2.WatchRequest) else request.name
        if name not in self.runs:
            Refusal(grpc.StatusCode.NOT_FOUND, "RUN_NOT_FOUND", f"no such run. name={name}").abort(context)
        return self.runs[name]

    def GetRun(self, request: Any, context: grpc.ServicerContext) -> runs_pb2.GetRunResponse:
        return runs_pb2.GetRunResponse(run=self._run(request, context), learners=self.learners)

    def ListRuns(self, request: Any, context: grpc.ServicerContext) -> runs_pb2.ListRunsResponse:
        return runs_pb2.ListRunsResponse(runs=[self.runs[name] for name in sorted(self.runs)])

    def SetPolicy(self, request: Any, context: grpc.ServicerContext) -> runs_pb2.SetPolicyResponse:
        run = self._run(request, context)
        run.policy.MergeFrom(request.policy)
        return runs_pb2.SetPolicyResponse(run=run)

    def ListVersions(self, request: Any, context: grpc.ServicerContext) -> runs_pb2.ListVersionsResponse:
        run = self._run(request, context)
        (newest,) = [version for version in run.versions if version.fragment == request.fragment]
        first = v1.FragmentVersion(fragment=request.fragment, version=0)
        merged = [v1.DeltaFate(learner_id="us", weight_share=1.0, staleness=1, fate=v1.FATE_MERGED)]
        made = {"position": 7, "merged": merged, "update_size_bytes": 1500, "participation": 0.75}
        return runs_pb2.ListVersionsResponse(
            versions=[
                runs_pb2.VersionRecord(version=newest, source_version=-1, **made),  # type: ignore[arg-type]  # a plain dict
                runs_pb2.VersionRecord(version=first, position=1, has_snapshot=True, source_version=-1),
            ]
        )

    def RollBack(self, request: Any, context: grpc.ServicerContext) -> runs_pb2.RollBackResponse:
        run = self._run(request, context)
        if self.progress:
            return runs_pb2.RollBackResponse(run=run, progress=self.progress.pop(0))
        run.position += 1
        return runs_pb2.RollBackResponse(run=run)

    def CloseRun(self, request: Any, context: grpc.ServicerContext) -> runs_pb2.CloseRunResponse:
        run = self._run(request, context)
        run.status = v1.RUN_STATUS_CLOSED
        return runs_pb2.CloseRunResponse(run=run)

    def DeleteRun(self, request: Any, context: grpc.ServicerContext) -> runs_pb2.DeleteRunResponse:
        del self.runs[self._run(request, context).name]
        return runs_pb2.DeleteRunResponse()

    def Watch(self, request: Any, context: grpc.ServicerContext) -> Iterator[exchange_pb2.WatchResponse]:
        start = exchange_pb2.WatchStart(run=self._run(request, context), learners=self.learners)
        steps = self.watches.pop(0)
        if isinstance(steps, Refusal):
            steps.abort(context)
            return
        yield exchange_pb2.WatchResponse(start=start)
        for step in steps:
            if isinstance(step, Refusal):
                step.abort(context)
            else:
                yield exchange_pb2.WatchResponse(event=step)


def scripted(*watches: Sequence[WatchStep] | Refusal) -> Script:
    """Returns a script of the run "demo" and the learner "us"."""
    return Script(*watches)  # type: ignore[abstract]  # the rest is not asked


@contextmanager
def serving(script: Script) -> Iterator[str]:
    """Serves a script on loopback and gives its target."""
    server = grpc.server(ThreadPoolExecutor(max_workers=4))
    runs_pb2_grpc.add_RunsServicer_to_server(script, server)
    exchange_pb2_grpc.add_ExchangeServicer_to_server(script, server)
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
    learner_id: str = "us", *, is_participating: bool = True, region: str = "us-east"
) -> v1.LearnerStatus:
    """Returns a live learner that has reported."""
    report = v1.LearnerReport(step_count=120, token_count=245_760, loss=2.5, sent_bytes=1000)
    report.step_time.FromMilliseconds(35)
    return v1.LearnerStatus(
        learner_id=learner_id, region=region, is_live=True, is_participating=is_participating, report=report
    )
