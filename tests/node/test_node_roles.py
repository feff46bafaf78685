"""Who may call what, as a client in Node finds it out; docs/security.md has the table that must come true."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from skerry.v1 import runs_pb2 as runs
from skerry.wire.identity import Identity
from tests.node.deployment import ADMIN, LEARNER, LEARNER_OF_DEMO, LEARNER_OF_GPT, READER, Deployment, attach
from tests.node.node_clients import ROOT, check_steps, train
from tests.support.made_keys import make_keys
from tests.support.raw_learner import create_run, plan_messages

ID = "a" * 32
CALLERS = {
    "nobody": None,
    "reader": READER,
    "learner of any run": LEARNER,
    "learner of this run": LEARNER_OF_DEMO,
    "learner of another run": LEARNER_OF_GPT,
    "admin": ADMIN,
}
# What the table's cells say of a call that speaks as the caller's own learner id or not, with initial weights or not.
CELLS: dict[str, Callable[[bool, bool], bool]] = {
    "yes": lambda is_own, is_initial: True,
    "no": lambda is_own, is_initial: False,
    "as its own id": lambda is_own, is_initial: is_own,
    "initial weights": lambda is_own, is_initial: is_initial,
    "as its own id, or initial weights": lambda is_own, is_initial: is_own or is_initial,
}
REFUSALS = {"UNAUTHENTICATED", "PERMISSION_DENIED"}
# What is answered OK where the table allows it: the scan's requests are not refused for another reason.
READS = {"GetCapabilities", "GetRun", "ListVersions", "Watch", "PullFragment"}
WORKS = {
    "nobody": set[str](),
    "reader": READS | {"ListRuns"},
    "learner of any run": READS | {"Attach", "QueryPush", "CommitRun"},
    "learner of this run": READS | {"Attach", "QueryPush", "CommitRun"},
    "learner of another run": {"GetCapabilities"},
    "admin": READS
    | {"ListRuns", "QueryPush", "CommitRun", "SetPolicy", "RollBack", "UpgradeRun", "CloseRun", "DeleteRun"},
}


def table() -> dict[str, dict[str, str]]:
    """Returns what docs/security.md says of each method and role."""
    text = (ROOT / "docs" / "security.md").read_text().partition("## Who may do what")[2]
    head, _, *rows = itertools.takewhile(lambda line: line.startswith("|"), text[text.index("|") :].splitlines())
    roles = _cells(head)[1:]
    said = [(_cells(row)[0], dict(zip(roles, _cells(row)[1:], strict=True))) for row in rows]
    found = [(method, cells) for calls, cells in said for method in re.findall(r"\b[A-Z]\w+", calls)]
    assert len(dict(found)) == len(found), "no method is in the table twice"
    return dict(found)


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def by_table(method: str, caller: Identity | None, fields: dict[str, Any]) -> str:
    """Returns the code with which a call is refused, as the document has it; empty if it is not."""
    if caller is None:
        return "UNAUTHENTICATED"
    cell = table()[method.partition("/")[2]][caller.role]
    is_own, is_initial = fields.get("learner_id") == caller.name, fields.get("base_version") == -1
    is_of_another_run = caller.run not in {"", "demo"} and names_run(fields)
    return "" if CELLS[cell](is_own, is_initial) and not is_of_another_run else "PERMISSION_DENIED"


def names_run(fields: dict[str, Any]) -> bool:
    return "run" in fields or "name" in fields


def requests(methods: dict[str, set[str]], run_uid: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each method with what it is asked: about the run demo, as either learner, with initial weights and not."""
    values: dict[str, Sequence[Any]] = {
        "run": ["demo"],
        "name": ["demo"],
        "run_uid": [run_uid],
        "learner_id": ["us", "eu"],
        "base_version": [-1, 0],
        "session_id": [ID],
        "request_id": [ID],
        "delta_id": [ID],
        "fragment": ["body"],
        "from_version": [-1],
        "is_newest": [True],
        "target_position": [1],
    }
    for method, fields in methods.items():
        names = sorted(fields & values.keys())
        for chosen in itertools.product(*(values[name] for name in names)):
            yield method, dict(zip(names, chosen, strict=True))


@pytest.mark.parametrize("way", ["certificate", "token"])
async def test_each_caller_is_refused_the_methods_that_the_documented_table_says_and_no_others(
    way: str, deployment: Deployment
) -> None:
    by_token = way == "token"
    tls = {
        who: await deployment.token(caller) if by_token else deployment.certificate(caller)
        for who, caller in CALLERS.items()
    }
    roles = ["--tokens"] if by_token else ["--tls-client-ca", f"{deployment.keys}/ca.pem"]
    async with deployment.served(tls["admin"], *roles) as (client, _, run, _):
        methods = await client.methods()
        assert {method.partition("/")[2] for method in methods} == table().keys()
        for who, caller in CALLERS.items():
            await client.open(who, tls[who])
            worked = set[str]()
            for method, fields in requests(methods, run.uid):
                answer = await client.call(who, method, **fields)
                refusal = answer.code if answer.code in REFUSALS else ""
                assert (who, method, fields, refusal) == (who, method, fields, by_table(method, caller, fields))
                assert not refusal or answer.reason == refusal
                worked |= {method.partition("/")[2]} if answer.code == "OK" else set()
            assert worked == WORKS[who]


async def test_a_learner_of_one_run_does_not_reach_another_by_its_uid(deployment: Deployment) -> None:
    admin = deployment.certificate(ADMIN)
    async with deployment.served(admin, "--tls-client-ca", f"{deployment.keys}/ca.pem") as served:
        gpt, _ = await create_run(served.admin, "gpt")
        tensors, fragments = plan_messages()
        new = runs.CreateRunRequest(request_id=ID, name="new", tensors=tensors, fragments=fragments)
        draft = (await served.admin.runs.CreateRun(new)).run
        await served.client.open("us", deployment.certificate(LEARNER_OF_DEMO))
        methods = await served.client.methods()
        for uid in (gpt.uid, draft.uid):
            refused = set[str]()
            for method, fields in requests(methods, uid):
                if "run_uid" in fields and not by_table(method, LEARNER_OF_DEMO, fields):
                    answer = await served.client.call("us", method, **fields)
                    assert (method, answer.reason) == (method, "RUN_REPLACED")
                    refused.add(method)
            assert len(refused) == 8


async def test_where_enrolment_is_by_run_only_learners_of_the_run_join_it(deployment: Deployment) -> None:
    keys, admin = deployment.keys, deployment.certificate(ADMIN)
    make_keys(keys, "--learner", "node", "--learner", "demo/node")
    any_run, this_run = await deployment.token(LEARNER), await deployment.token(LEARNER_OF_DEMO)
    options = ("--tls-client-ca", f"{keys}/ca.pem", "--tokens", "--enrol-by-run")
    async with deployment.served(admin, *options) as served:
        pems = {
            name: [keys / file for file in ("ca.pem", f"{name}.pem", f"{name}.key")] for name in ("node", "demo.node")
        }
        status, _, errors = await train(deployment.node_modules, served.port, *pems["node"])
        assert status == 1
        assert "7 PERMISSION_DENIED: learners are enrolled run by run here" in errors
        status, output, errors = await train(deployment.node_modules, served.port, *pems["demo.node"])
        assert status == 0, errors
        check_steps(output)
        # A token decides who its caller is, whatever the certificate says.
        await served.client.open("any run", replace(deployment.certificate(LEARNER_OF_DEMO), token=any_run.token))
        for method, fields in requests(await served.client.methods(), served.run.uid):
            answer = await served.client.call("any run", method, **fields)
            is_allowed = not names_run(fields) and not by_table(method, LEARNER, fields)
            assert (method, answer.code) == (method, "OK" if is_allowed else "PERMISSION_DENIED")
        await served.client.open("this run", replace(deployment.certificate(LEARNER), token=this_run.token))
        assert (await attach(served, "this run", "us")).code == "OK"
