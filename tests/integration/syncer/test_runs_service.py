"""The life of runs, over real sockets."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
import numpy as np
import pytest

from skerry.v1 import exchange_pb2 as exchange
from skerry.v1 import runs_pb2 as runs
from skerry.v1 import types_pb2 as types
from tests.support.raw_learner import (
    INT4,
    QUICK,
    RawLearner,
    Stubs,
    attached,
    commit,
    create_draft,
    create_run,
    delta_values,
    plan_messages,
    pull,
    push_messages,
    refused,
    send,
)

PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
NOT_FOUND = grpc.StatusCode.NOT_FOUND
EXISTS = grpc.StatusCode.ALREADY_EXISTS


def _create() -> runs.CreateRunRequest:
    tensors, fragments = plan_messages()
    return runs.CreateRunRequest(request_id="1" * 32, name="demo", tensors=tensors, fragments=fragments)


def _policy(name: str = "demo", **changes: Any) -> runs.SetPolicyRequest:
    return runs.SetPolicyRequest(request_id="1" * 32, name=name, policy=types.Policy(**changes))


def _listing(**fields: Any) -> runs.ListVersionsRequest:
    return runs.ListVersionsRequest(name="demo", fragment="body", **fields)


async def test_of_several_creators_one_wins_with_all_of_its_own_weights(stubs: Stubs) -> None:
    results = await asyncio.gather(*(create_run(stubs, "demo", seed=seed) for seed in range(4)), return_exceptions=True)
    ((run, weights),) = [result for result in results if not isinstance(result, BaseException)]
    losers = [result.code() for result in results if isinstance(result, grpc.aio.AioRpcError)]
    assert losers == [EXISTS] * 3
    assert run.status == types.RUN_STATUS_OPEN
    assert [(version.fragment, version.version) for version in run.versions] == [("body", 0), ("head", 0)]
    for fragment, values in weights.items():
        assert np.array_equal((await pull(stubs, run, fragment)).values, values)
    with refused("RUN_EXISTS", EXISTS) as caught:
        await create_run(stubs, seed=9)
    assert caught[0].metadata["run_uid"] == run.uid


async def test_a_draft_is_found_by_its_uid_alone_and_can_not_be_used(stubs: Stubs) -> None:
    draft = (await stubs.runs.CreateRun(_create())).run
    again = (await stubs.runs.CreateRun(_create())).run
    assert (draft.uid, draft.status) == (again.uid, types.RUN_STATUS_DRAFT)
    other = _create()
    other.tensors[0].shape[0] += 1
    with refused("ID_REUSED", EXISTS):
        await stubs.runs.CreateRun(other)
    with refused("RUN_NOT_FOUND", NOT_FOUND):
        await stubs.runs.GetRun(runs.GetRunRequest(name="demo"))
    for call in (
        attached(stubs, draft),
        stubs.exchange.Watch(exchange.WatchRequest(run="demo", run_uid=draft.uid)).read(),
        commit(stubs, draft),  # without weights
    ):
        with refused("RUN_DRAFT", PRECONDITION):
            await call
    with refused("RUN_NOT_FOUND", NOT_FOUND):
        await stubs.runs.DeleteRun(runs.DeleteRunRequest(name="demo", run_uid=draft.uid))
    assert not (await stubs.runs.ListRuns(runs.ListRunsRequest())).runs
    view = await stubs.runs.GetRun(runs.GetRunRequest(name="demo", run_uid=draft.uid))
    assert (view.run.uid, view.run.status) == (draft.uid, types.RUN_STATUS_DRAFT)


async def test_initial_weights_are_exact_and_their_creators(stubs: Stubs) -> None:
    draft = (await stubs.runs.CreateRun(_create())).run
    header = exchange.PushHeader(run="demo", run_uid=draft.uid, fragment="body", base_version=-1)
    header.learner_id, header.session_id, header.delta_id = "thief", "4" * 32, "5" * 32
    with refused("SESSION_UNKNOWN", PRECONDITION):
        await send(stubs, push_messages(header, delta_values(), INT4))
    header.session_id = _create().request_id
    with refused("ENCODING_UNSUPPORTED", grpc.StatusCode.INVALID_ARGUMENT):
        await send(stubs, push_messages(header, delta_values(), INT4))


async def test_a_name_that_no_run_has_is_answered_with_those_that_resemble_it(stubs: Stubs) -> None:
    await create_run(stubs, "gemma-12b")
    await create_run(stubs, "other")
    for name, similar in (("gemma-21b", {"similar_names": "gemma-12b"}), ("llama", {})):
        with refused("RUN_NOT_FOUND", NOT_FOUND) as caught:
            await stubs.runs.GetRun(runs.GetRunRequest(name=name))
        assert caught[0].metadata == similar


async def test_a_push_of_initial_weights_and_a_commit_may_be_repeated(stubs: Stubs) -> None:
    (draft, weights), again = await create_draft(stubs), await create_draft(stubs)
    assert again[0].uid == draft.uid
    committed = [await commit(stubs, draft) for _ in range(2)]
    assert [run.status for run in committed] == [types.RUN_STATUS_OPEN] * 2
    assert np.array_equal((await pull(stubs, draft, "body")).values, weights["body"])


@pytest.mark.parametrize("is_by_size", [False, True])
async def test_runs_are_listed_by_name_in_pages_with_what_was_changed_before(
    stubs: Stubs, monkeypatch: pytest.MonkeyPatch, is_by_size: bool
) -> None:
    monkeypatch.setattr("skerry_syncer.rpc.runs._PAGE_BYTES", 1 if is_by_size else 2**21)
    created = {name: (await create_run(stubs, name))[0] for name in ("c", "a", "b")}
    await stubs.runs.SetPolicy(_policy("b", inner_step_count=77))
    await stubs.runs.DeleteRun(runs.DeleteRunRequest(name="c", run_uid=created["c"].uid))
    first = await stubs.runs.ListRuns(runs.ListRunsRequest(page_size=0 if is_by_size else 1))
    assert [run.name for run in first.runs] == ["a"]
    rest = await stubs.runs.ListRuns(runs.ListRunsRequest(page_token=first.next_page_token))
    assert ([run.name for run in rest.runs], rest.next_page_token) == (["b"], "")
    assert rest.runs[0].policy.inner_step_count == 77


async def test_a_policy_changes_in_the_fields_that_are_given(stubs: Stubs, learner: RawLearner) -> None:
    changed = (await stubs.runs.SetPolicy(_policy(max_staleness=3))).run.policy
    assert (changed.max_staleness, changed.inner_step_count) == (3, QUICK.inner_step_count)
    assert (await learner.event("policy_changed")).policy_changed.max_staleness == 3
    again = (await stubs.runs.SetPolicy(_policy(max_staleness=4))).run.policy
    assert again.max_staleness == 3, "a request id is applied once"


async def test_a_roll_back_gives_the_next_version_older_content(
    stubs: Stubs, run: types.Run, learner: RawLearner
) -> None:
    first = await learner.advance(1)
    wanted = await pull(stubs, run, "body")
    await learner.advance(2)
    newest = await pull(stubs, run, "body")
    pending = learner.header(newest, "body", steps=1)
    await learner.push(pending, delta_values(8))
    request = runs.RollBackRequest(request_id="2" * 32, name="demo", target_position=first.position)
    for _ in range(2):  # a request id is applied once
        rolled = (await stubs.runs.RollBack(request)).run
        assert [(version.fragment, version.version) for version in rolled.versions] == [("body", 3), ("head", 1)]
    assert list((await learner.event("rolled_back")).rolled_back.source_versions) == [1, 0]
    (expired,) = (await learner.event("fates_decided")).fates_decided.fates
    assert (expired.delta_id, expired.fate) == (pending.delta_id, types.FATE_EXPIRED)
    (observed,) = (await stubs.runs.GetRun(runs.GetRunRequest(name="demo"))).learners
    reason = expired.reason.partition(". ")[0]
    assert types.FateCount(fate=types.FATE_EXPIRED, reason=reason, delta_count=1) in observed.fates
    after = await pull(stubs, run, "body", base=newest)
    assert after.plan.from_version == -1, "who has an abandoned version is given a snapshot"
    assert np.array_equal(after.values, wanted.values)
    with refused("BASE_STALE", PRECONDITION):
        await learner.push(learner.header(newest, "body"), delta_values(9))
    await learner.advance()
    assert (await pull(stubs, run, "body", base=after)).version == 4
    pages = [await stubs.runs.ListVersions(_listing(**page)) for page in ({"page_size": 2}, {"before_version": 3})]
    listed = [version for page in pages for version in page.versions]
    assert [version.version.version for version in listed] == [4, 3, 2, 1, 0]
    assert [version.is_abandoned for version in listed] == [False, False, True, False, False]
    assert [[delta.learner_id for delta in version.merged] for version in listed] == [["eu"], [], ["eu"], ["eu"], []]
    assert listed[1].source_version == 1


async def test_a_closed_run_has_a_fate_for_every_delta_and_is_read_only(
    stubs: Stubs, run: types.Run, learner: RawLearner
) -> None:
    base = await pull(stubs, run, "body")
    header = learner.header(base, "body", steps=1)
    await learner.push(header, delta_values())
    for _ in range(2):
        closed = (await stubs.runs.CloseRun(runs.CloseRunRequest(name="demo"))).run
        assert closed.status == types.RUN_STATUS_CLOSED
    assert (await learner.query(header)).fate.fate == types.FATE_MERGED
    assert (await pull(stubs, run, "body")).version == 1
    for call in (
        learner.push(learner.header(base, "body"), delta_values()),
        attached(stubs, run, "us"),
        stubs.runs.SetPolicy(_policy(max_staleness=3)),
        stubs.runs.RollBack(runs.RollBackRequest(request_id="2" * 32, name="demo", target_position=3)),
    ):
        with refused("RUN_CLOSED", PRECONDITION):
            await call


async def test_a_deleted_run_gives_its_name_to_another(stubs: Stubs, run: types.Run) -> None:
    request = runs.DeleteRunRequest(name="demo", run_uid=run.uid)
    for _ in range(2):
        await stubs.runs.DeleteRun(request)
    with refused("RUN_NOT_FOUND", NOT_FOUND):
        await stubs.runs.GetRun(runs.GetRunRequest(name="demo"))
    newer, _ = await create_run(stubs, seed=2)
    with refused("RUN_REPLACED", PRECONDITION):
        await stubs.runs.DeleteRun(request)
    with refused("RUN_REPLACED", PRECONDITION) as caught:
        await RawLearner(stubs, run, "eu", random.Random(1)).attach()
    assert caught[0].metadata["run_uid"] == newer.uid
