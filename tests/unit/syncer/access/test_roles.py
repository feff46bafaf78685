"""Who may call what: every method by every kind of caller."""

from __future__ import annotations

from typing import Any

import pytest

from skerry.v1 import capabilities_pb2 as capabilities
from skerry.v1 import exchange_pb2 as exchange
from skerry.v1 import runs_pb2 as runs
from skerry.wire.identity import Identity, Role
from skerry_syncer.access.roles import RULES, check_message, check_role
from skerry_syncer.errors import SyncerError
from skerry_syncer.store.log.entries import INITIAL_BASE

ID = "a" * 32
# What each method is asked, about the run demo and as the learner us.
REQUESTS: dict[str, Any] = {
    "Capabilities/GetCapabilities": capabilities.GetCapabilitiesRequest(),
    "Exchange/Attach": exchange.AttachRequest(hello=exchange.Hello(run="demo", learner_id="us", session_id=ID)),
    "Exchange/PushDelta": exchange.PushDeltaRequest(
        header=exchange.PushHeader(run="demo", run_uid=ID, learner_id="us", session_id=ID, delta_id=ID)
    ),
    "Exchange/QueryPush": exchange.QueryPushRequest(run="demo", run_uid=ID, delta_id=ID),
    "Exchange/PullFragment": exchange.PullFragmentRequest(run="demo", fragment="body", from_version=-1),
    "Exchange/Watch": exchange.WatchRequest(run="demo"),
    "Runs/CreateRun": runs.CreateRunRequest(request_id=ID, name="demo"),
    "Runs/CommitRun": runs.CommitRunRequest(name="demo", run_uid=ID),
    "Runs/GetRun": runs.GetRunRequest(name="demo"),
    "Runs/ListVersions": runs.ListVersionsRequest(name="demo", fragment="body"),
    "Runs/ListRuns": runs.ListRunsRequest(),
    "Runs/SetPolicy": runs.SetPolicyRequest(request_id=ID, name="demo"),
    "Runs/SetEjection": runs.SetEjectionRequest(request_id=ID, name="demo", learner_id="us", is_ejected=True),
    "Runs/ReportMetrics": runs.ReportMetricsRequest(request_id=ID, name="demo", position=1, judge="us"),
    "Runs/RollBack": runs.RollBackRequest(request_id=ID, name="demo", target_position=1),
    "Runs/CloseRun": runs.CloseRunRequest(name="demo"),
    "Runs/DeleteRun": runs.DeleteRunRequest(name="demo", run_uid=ID),
}
METHODS = {
    f"{service.name}/{method.name}": method
    for module in (capabilities, exchange, runs)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
CALLERS = {
    "reader": Identity(Role.READER, "prom"),
    "learner": Identity(Role.LEARNER, "us"),
    "learner of the run": Identity(Role.LEARNER, "us", "demo"),
    "another learner of the run": Identity(Role.LEARNER, "eu", "demo"),
    "learner of another run": Identity(Role.LEARNER, "us", "gpt"),
    "admin": Identity(Role.ADMIN, "anna"),
}
READS = {"GetCapabilities", "PullFragment", "Watch", "GetRun", "ListVersions"}
CREATES = {"CreateRun", "CommitRun", "QueryPush"}
WRITES = CREATES | {"ReportMetrics"}
# By hand, so that `RULES` can't be wrong without a test that fails.
ALLOWED = {
    "reader": READS | {"ListRuns"},
    "learner": READS | WRITES | {"Attach", "PushDelta"},
    "learner of the run": READS | WRITES | {"Attach", "PushDelta"},
    "another learner of the run": READS | WRITES,
    "learner of another run": {"GetCapabilities"},
    "admin": {method.partition("/")[2] for method in METHODS} - {"Attach", "PushDelta"},
}


def is_allowed(caller: Identity, method: str, message: Any) -> bool:
    try:
        check_role(method, caller)
        check_message(method, caller, message)
    except SyncerError as error:
        return error.reason != "PERMISSION_DENIED"
    return True


def test_every_method_of_the_contract_is_in_the_table_and_in_this_scan() -> None:
    assert RULES.keys() == METHODS.keys() == REQUESTS.keys()


@pytest.mark.parametrize("who", CALLERS)
def test_every_method_is_allowed_to_whom_it_should_be(who: str) -> None:
    allowed = {method for method, request in REQUESTS.items() if is_allowed(CALLERS[who], method, request)}
    assert {method.partition("/")[2] for method in allowed} == ALLOWED[who]


def test_initial_weights_belong_to_no_learner() -> None:
    header = exchange.PushHeader(run="demo", learner_id="creator", base_version=INITIAL_BASE)
    request = exchange.PushDeltaRequest(header=header)
    allowed = {who for who, caller in CALLERS.items() if is_allowed(caller, "Exchange/PushDelta", request)}
    assert allowed == {"learner", "learner of the run", "another learner of the run", "admin"}


def test_a_stream_that_does_not_say_for_whom_it_speaks_is_for_nobody() -> None:
    learner = CALLERS["learner"]
    assert not is_allowed(learner, "Exchange/Attach", exchange.AttachRequest(leave=exchange.Leave()))
    assert not is_allowed(learner, "Exchange/PushDelta", exchange.PushDeltaRequest(data=b"weights"))
