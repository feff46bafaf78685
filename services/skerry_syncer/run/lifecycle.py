"""The life of a run: create, commit, set policy, judge, close, delete. Every step is idempotent."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Final

from blake3 import blake3

from skerry.runtime.logs import get_logger
from skerry.wire.layout import check_id, check_name
from skerry.wire.policy import Policy
from skerry_syncer.access.caller import author, calling_learner
from skerry_syncer.errors import SyncerError, bad_request, from_rejection
from skerry_syncer.run.host import RunHost, lost_name
from skerry_syncer.run.replica import RunReplica
from skerry_syncer.store.log.entries import EjectionItem, MetricsItem, PolicyItem, RunSpec, RunStatus, StatusItem
from skerry_syncer.store.log.state import LearnerState, ReportState, RunState

_LOG: Final = get_logger(__name__)
# Limits of one run: far above what is trained today, far below what the process that folds it could not hold.
MAX_TENSOR_COUNT: Final = 100_000  # frozen ones included
MAX_FRAGMENT_COUNT: Final = 512
# In parts of the suggested size a delta of so many elements still fits one log entry.
MAX_FRAGMENT_NUMEL: Final = 2**35
# Of one report, which the log keeps for ever.
_MAX_METRIC_COUNT: Final = 16


def uid_of_draft(name: str, request_id: str) -> str:
    """Returns the uid of the draft that a CreateRun request makes, the same on every replica and at every retry."""
    return blake3(f"skerry.run.v1\0{name}\0{request_id}".encode()).hexdigest()[:32]


async def create_run(host: RunHost, spec: RunSpec, request_id: str, policy: Policy) -> RunReplica:
    """Returns the run that the request created, now or at an earlier call; it may be past its draft.

    Raises:
        SyncerError: TOO_LARGE; SHAPE_MISMATCH; BAD_REQUEST.
        RunExistsError: another run has the name.
        DraftConflictError: the request id was used for another run.
    """
    await host.workers.run(_check_plan, spec)
    _check_merge_rules(policy, {layout.name for layout in spec.fragments})
    await host.store.create_draft(spec)
    replica = await host.open(spec.name, spec.uid, is_creator=True)
    if replica.state.status is RunStatus.DRAFT and request_id not in replica.state.requests:
        (outcome,) = await replica.log.append([PolicyItem(request_id, policy, author())])
        if outcome.rejection is not None and request_id not in replica.state.requests:
            raise from_rejection(outcome.rejection)
    return replica


def _check_plan(spec: RunSpec) -> None:
    largest = max(layout.numel for layout in spec.fragments)
    names = [*spec.dtypes, *(tensor.name for tensor in spec.untrained)]
    for name, value, limit, advice in (
        ("tensors", len(names), MAX_TENSOR_COUNT, "keep those of a layer's experts in one tensor"),
        ("fragments", len(spec.fragments), MAX_FRAGMENT_COUNT, "state a smaller fragment_count"),
        ("elements in a fragment", largest, MAX_FRAGMENT_NUMEL, "state a larger fragment_count"),
    ):
        if value > limit:
            raise SyncerError("TOO_LARGE", f"too many {name}: {advice}. limit={limit}, actual={value}")
    if len(set(names)) != len(names):
        raise SyncerError("SHAPE_MISMATCH", "a tensor is named twice among trained and untrained ones")


def _check_merge_rules(policy: Policy, fragments: AbstractSet[str]) -> None:
    unknown = sorted(policy.merge_by_fragment.keys() - fragments)
    if unknown:
        raise bad_request(f"merge rule for a fragment that the run does not have. fragments={unknown[:20]}")


async def commit_run(host: RunHost, name: str, uid: str, seen_position: int) -> RunReplica:
    """Opens the draft and gives it its name.

    Raises:
        SyncerError: RUN_DRAFT: initial weights are missing.
        RunExistsError: another run has the name.
    """
    replica = await host.open(name, check_id(uid, "run uid"), seen_position=seen_position, is_creator=True)
    if await replica.is_draft():
        fragments = sorted(replica.state.fragments.items())
        missing = [name for name, fragment in fragments if fragment.version < 0 and not fragment.pending]
        if missing:
            raise SyncerError("RUN_DRAFT", f"initial weights are missing. fragments={missing[:20]}")
        for fragment, _ in fragments:
            await replica.merger.seed(fragment)
        await replica.log.append([StatusItem(RunStatus.OPEN, author())])
    await host.store.publish(name, uid)
    host.forget_name(name)
    _LOG.info("run committed", run=name, uid=uid, author=author())
    return replica


async def set_policy(replica: RunReplica, request_id: str, change: Callable[[Policy], Policy]) -> None:
    """Replaces the policy by `change(policy)`, once for each request id.

    Raises:
        SyncerError: RUN_CLOSED; BAD_REQUEST: a field is out of its range.
    """
    check_id(request_id, "request id")
    if request_id in replica.state.requests:
        return
    await replica.log.tail()
    caller = author()

    def changed(state: RunState) -> PolicyItem:
        """Changes the newest policy, so that what other requests have changed is kept."""
        try:
            policy = change(state.policy)
        except ValueError as error:
            raise bad_request(str(error)) from error
        _check_merge_rules(policy, state.fragments.keys())
        return PolicyItem(request_id, policy, caller)

    outcome = await replica.log.append_made(changed)
    if outcome.rejection is not None and request_id not in replica.state.requests:
        raise from_rejection(outcome.rejection)


async def set_ejection(replica: RunReplica, request_id: str, learner: str, *, is_ejected: bool) -> LearnerState:
    """Returns a learner that is ejected from the run, or readmitted, once for each request id.

    Raises:
        SyncerError: LEARNER_NOT_FOUND; ID_REUSED.
        BadNameError: the learner's name is not legal.
    """
    item = EjectionItem(check_id(request_id, "request id"), check_name(learner, "learner"), is_ejected, author())
    if request_id not in replica.state.requests:
        (outcome,) = await replica.log.append([item])
        is_new = request_id not in replica.state.requests  # else this call is repeated, and was applied
        if outcome.rejection is not None and outcome.rejection.reason != "REPEATED" and is_new:
            raise from_rejection(outcome.rejection)
        _LOG.info("ejection set", run=replica.log.spec.name, learner=learner, is_ejected=is_ejected, author=author())
    return replica.state.learners[learner]


async def report_metrics(
    replica: RunReplica, request_id: str, position: int, *, judge: str, metrics: Mapping[str, float]
) -> ReportState:
    """Returns a judge's report of the versions at a position as the run keeps it, once for each request id.

    Raises:
        SyncerError: PERMISSION_DENIED: a learner reports as another judge; VERSION_NOT_FOUND: no such position;
            RUN_DRAFT; BAD_REQUEST; ID_REUSED.
        BadNameError: the judge's name or a metric's is not legal.
    """
    check_id(request_id, "request id")
    if calling_learner() not in ("", check_name(judge, "judge")):
        raise SyncerError("PERMISSION_DENIED", f"a learner judges by its own name. caller={author()}, judge={judge}")
    if not 1 <= len(metrics) <= _MAX_METRIC_COUNT:
        raise bad_request(f"a report has 1 to {_MAX_METRIC_COUNT} metrics. metrics={len(metrics)}")
    values = {check_name(name, "metric"): value if math.isfinite(value) else None for name, value in metrics.items()}
    if request_id not in replica.state.reports:
        (outcome,) = await replica.log.append([MetricsItem(request_id, position, judge, values, author())])
        if outcome.rejection is not None and request_id not in replica.state.reports:
            raise from_rejection(outcome.rejection)
    return replica.state.reports[request_id]


async def close_run(replica: RunReplica) -> None:
    """Ends the run, and returns when every accepted delta has its fate.

    Raises:
        SyncerError: RUN_DRAFT.
    """
    if await replica.is_draft():
        raise SyncerError("RUN_DRAFT", "a draft can't be closed; commit it first, or abandon it")
    if replica.state.status is RunStatus.OPEN:
        await replica.log.append([StatusItem(RunStatus.CLOSING, author())])
    await replica.closed()


async def delete_run(host: RunHost, name: str, uid: str) -> None:
    """Removes the run's name.

    Raises:
        SyncerError: RUN_NOT_FOUND: no run of that uid ever had the name; RUN_REPLACED: another run has the name.
    """
    check_name(name, "run")
    check_id(uid, "run uid")
    history = await host.store.name_history(name)
    named = history[-1] if history else None
    if named is None and uid in history:
        return  # an earlier call deleted it
    if named != uid:
        raise lost_name(name, uid, named)
    await host.store.unpublish(name, uid)
    host.forget_name(name)
    _LOG.info("run deleted", run=name, uid=uid, author=author())  # the log of a run can be deleted with it
