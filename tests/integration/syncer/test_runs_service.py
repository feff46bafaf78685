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
from skerry_syncer.server import SyncerServer
from skerry_syncer.store.log.entries import SessionItem
from tests.support.raw_learner import (
    FLOAT32,
    QUICK,
    Float32s,
    RawLearner,
    Stubs,
    create_run,
    hex_id,
    layout,
    plan_messages,
    pull,
    push_messages,
    refused,
    send,
)

PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION


def _values(seed: int, fragment: str = "body") -> Float32s:
    return (0.1 * np.random.default_rng(seed).standard_normal(layout(fragment).numel)).astype(np.float32)


async def _versions(stubs: Stubs, learner: RawLearner, count: int) -> list[types.Event]:
    events = []
    for _ in range(count):
        base = await pull(stubs, learner.run, "body")
        await learner.push(learner.header(base, "body"), _values(base.version))
        events.append(await learner.event("version_committed"))
    return events


async def _attached(stubs: Stubs, run: types.Run, name: str = "eu") -> RawLearner:
    learner = RawLearner(stubs, run, name, random.Random(name))
    await learner.attach()
    return learner


async def test_a_created_run_has_the_weights_of_its_creator(stubs: Stubs) -> None:
    run, weights = await create_run(stubs)
    assert run.status == types.RUN_STATUS_OPEN
    assert [(one.fragment, one.version) for one in run.versions] == [("body", 0), ("head", 0)]
    for fragment, values in weights.items():
        assert np.array_equal((await pull(stubs, run, fragment)).values, values)


async def test_a_draft_is_found_by_its_uid_alone(stubs: Stubs) -> None:
    tensors, fragments = plan_messages()
    request = runs.CreateRunRequest(request_id="1" * 32, name="demo", tensors=tensors, fragments=fragments)
    first = (await stubs.runs.CreateRun(request)).run
    again = (await stubs.runs.CreateRun(request)).run
    assert (first.uid, first.status) == (again.uid, types.RUN_STATUS_DRAFT)
    with refused("RUN_NOT_FOUND", grpc.StatusCode.NOT_FOUND):
        await stubs.runs.GetRun(runs.GetRunRequest(name="demo"))
    found = await stubs.runs.GetRun(runs.GetRunRequest(name="demo", run_uid=first.uid))
    assert found.run.uid == first.uid
    with refused("RUN_DRAFT", PRECONDITION):
        await RawLearner(stubs, first, "eu", random.Random(1)).attach()
    assert not (await stubs.runs.ListRuns(runs.ListRunsRequest())).runs


async def test_a_request_id_that_made_another_run_is_refused(stubs: Stubs) -> None:
    tensors, fragments = plan_messages()
    request = runs.CreateRunRequest(request_id="1" * 32, name="demo", tensors=tensors, fragments=fragments)
    await stubs.runs.CreateRun(request)
    request.tensors[0].shape[0] += 1
    with refused("ID_REUSED", grpc.StatusCode.ALREADY_EXISTS):
        await stubs.runs.CreateRun(request)


async def test_of_several_creators_one_wins_with_all_of_its_own_weights(stubs: Stubs) -> None:
    results = await asyncio.gather(*(create_run(stubs, "demo", seed=seed) for seed in range(4)), return_exceptions=True)
    winners = [result for result in results if not isinstance(result, BaseException)]
    losers = [result for result in results if isinstance(result, grpc.aio.AioRpcError)]
    assert (len(winners), len(losers)) == (1, 3)
    assert {error.code() for error in losers} == {grpc.StatusCode.ALREADY_EXISTS}
    run, weights = winners[0]
    for fragment, values in weights.items():
        assert np.array_equal((await pull(stubs, run, fragment)).values, values)


async def test_creating_a_run_that_exists_is_refused_and_names_it(stubs: Stubs) -> None:
    run, _ = await create_run(stubs)
    with refused("RUN_EXISTS", grpc.StatusCode.ALREADY_EXISTS) as caught:
        await create_run(stubs, seed=9)
    assert caught.refusal.metadata["run_uid"] == run.uid


async def test_a_name_that_no_run_has_is_answered_with_those_that_resemble_it(stubs: Stubs) -> None:
    await create_run(stubs, "gemma-12b")
    await create_run(stubs, "other")
    with refused("RUN_NOT_FOUND", grpc.StatusCode.NOT_FOUND) as near:
        await stubs.runs.GetRun(runs.GetRunRequest(name="gemma-21b"))
    with refused("RUN_NOT_FOUND", grpc.StatusCode.NOT_FOUND) as far:
        await stubs.runs.GetRun(runs.GetRunRequest(name="llama"))
    assert (near.refusal.metadata, far.refusal.metadata) == ({"similar_names": "gemma-12b"}, {})


async def test_a_commit_may_be_repeated(stubs: Stubs) -> None:
    run, _ = await create_run(stubs)
    again = await stubs.runs.CommitRun(runs.CommitRunRequest(name="demo", run_uid=run.uid))
    assert again.run.status == types.RUN_STATUS_OPEN


async def test_a_push_of_initial_weights_may_be_repeated(stubs: Stubs) -> None:
    tensors, fragments = plan_messages()
    created = await stubs.runs.CreateRun(
        runs.CreateRunRequest(request_id="1" * 32, name="demo", tensors=tensors, fragments=fragments)
    )
    for fragment in ("body", "head", "body"):
        header = exchange.PushHeader(
            run="demo",
            run_uid=created.run.uid,
            learner_id="eu",
            session_id="1" * 32,
            delta_id=("2" if fragment == "body" else "3") * 32,
            fragment=fragment,
            base_version=-1,
        )
        await send(stubs, push_messages(header, _values(1, fragment), FLOAT32))
    committed = await stubs.runs.CommitRun(runs.CommitRunRequest(name="demo", run_uid=created.run.uid))
    assert np.array_equal((await pull(stubs, committed.run, "body")).values, _values(1))


async def test_runs_are_listed_by_name_in_pages(stubs: Stubs) -> None:
    for name in ("c", "a", "b"):
        await create_run(stubs, name)
    first = await stubs.runs.ListRuns(runs.ListRunsRequest(page_size=2))
    assert [run.name for run in first.runs] == ["a", "b"]
    rest = await stubs.runs.ListRuns(runs.ListRunsRequest(page_size=2, page_token=first.next_page_token))
    assert ([run.name for run in rest.runs], rest.next_page_token) == (["c"], "")
    with refused("BAD_REQUEST", grpc.StatusCode.INVALID_ARGUMENT):
        await stubs.runs.ListRuns(runs.ListRunsRequest(page_token="../.."))


async def test_a_policy_changes_in_the_fields_that_are_given(stubs: Stubs) -> None:
    run, _ = await create_run(stubs)
    learner = await _attached(stubs, run)
    request = runs.SetPolicyRequest(request_id="1" * 32, name="demo", policy=types.Policy(max_staleness=3))
    changed = (await stubs.runs.SetPolicy(request)).run.policy
    assert (changed.max_staleness, changed.inner_step_count) == (3, QUICK.inner_step_count)
    assert (await learner.event("policy_changed")).policy_changed.max_staleness == 3
    request.policy.max_staleness = 4
    again = (await stubs.runs.SetPolicy(request)).run.policy
    assert again.max_staleness == 3, "a request id is applied once"
    with refused("BAD_REQUEST", grpc.StatusCode.INVALID_ARGUMENT):
        bad = types.Policy(quorum_count=0)
        await stubs.runs.SetPolicy(runs.SetPolicyRequest(request_id="2" * 32, name="demo", policy=bad))
    learner.detach()


async def test_versions_say_who_made_them(stubs: Stubs) -> None:
    run, _ = await create_run(stubs)
    learner = await _attached(stubs, run)
    await _versions(stubs, learner, 3)
    listed = await stubs.runs.ListVersions(runs.ListVersionsRequest(name="demo", fragment="body", page_size=2))
    assert [one.version.version for one in listed.versions] == [3, 2]
    assert [[delta.learner_id for delta in one.merged] for one in listed.versions] == [["eu"], ["eu"]]
    older = await stubs.runs.ListVersions(runs.ListVersionsRequest(name="demo", fragment="body", before_version=2))
    assert [one.version.version for one in older.versions] == [1, 0]
    assert older.versions[-1].has_snapshot
    with refused("FRAGMENT_NOT_FOUND", grpc.StatusCode.NOT_FOUND):
        await stubs.runs.ListVersions(runs.ListVersionsRequest(name="demo", fragment="tail"))
    learner.detach()


async def test_a_roll_back_gives_the_next_version_older_content(stubs: Stubs) -> None:
    run, _ = await create_run(stubs)
    learner = await _attached(stubs, run)
    events = await _versions(stubs, learner, 3)
    wanted = await pull(stubs, run, "body", target=1)
    newest = await pull(stubs, run, "body")
    pending = learner.header(newest, "body", steps=1)
    await learner.push(pending, _values(8))
    request = runs.RollBackRequest(request_id=hex_id(random.Random(1)), name="demo", target_position=events[0].position)
    rolled = (await stubs.runs.RollBack(request)).run
    assert [(one.fragment, one.version) for one in rolled.versions] == [("body", 4), ("head", 1)]
    told = (await learner.event("rolled_back")).rolled_back
    assert list(told.source_versions) == [1, 0]
    (expired,) = (await learner.event("fates_decided")).fates_decided.fates
    assert (expired.delta_id, expired.fate) == (pending.delta_id, types.FATE_EXPIRED)
    after = await pull(stubs, run, "body", base=newest)
    assert after.plan.from_version == -1, "who has an abandoned version is given a snapshot"
    assert np.array_equal(after.values, wanted.values)
    assert (await stubs.runs.RollBack(request)).run.versions[0].version == 4, "a request id is applied once"
    with refused("BASE_STALE", PRECONDITION):
        await learner.push(learner.header(newest, "body"), _values(9))
    await _versions(stubs, learner, 1)
    assert (await pull(stubs, run, "body", base=after)).version == 5
    listed = await stubs.runs.ListVersions(runs.ListVersionsRequest(name="demo", fragment="body"))
    assert [one.is_abandoned for one in listed.versions] == [False, False, True, True, False, False]
    assert [one.source_version for one in listed.versions][:2] == [-1, 1]
    learner.detach()


@pytest.mark.parametrize("position", [0, 1, 999])
async def test_a_roll_back_to_where_no_content_was_is_refused(stubs: Stubs, position: int) -> None:
    await create_run(stubs)
    with refused("VERSION_NOT_FOUND", grpc.StatusCode.NOT_FOUND):
        await stubs.runs.RollBack(runs.RollBackRequest(request_id="1" * 32, name="demo", target_position=position))


async def test_a_closed_run_has_a_fate_for_every_delta_and_is_read_only(stubs: Stubs) -> None:
    run, _ = await create_run(stubs)
    learner = await _attached(stubs, run)
    base = await pull(stubs, run, "body")
    header = learner.header(base, "body", steps=1)
    await learner.push(header, _values(1))
    closed = (await stubs.runs.CloseRun(runs.CloseRunRequest(name="demo"))).run
    assert closed.status == types.RUN_STATUS_CLOSED
    assert (await learner.query(header)).fate.fate == types.FATE_MERGED
    assert (await pull(stubs, run, "body")).version == 1
    with refused("RUN_CLOSED", PRECONDITION):
        await learner.push(learner.header(base, "body"), _values(2))
    with refused("RUN_CLOSED", PRECONDITION):
        await _attached(stubs, run, "us")
    with refused("RUN_CLOSED", PRECONDITION):
        change = types.Policy(max_staleness=3)
        await stubs.runs.SetPolicy(runs.SetPolicyRequest(request_id="1" * 32, name="demo", policy=change))
    with refused("RUN_CLOSED", PRECONDITION):
        await stubs.runs.RollBack(runs.RollBackRequest(request_id="2" * 32, name="demo", target_position=3))
    again = await stubs.runs.CloseRun(runs.CloseRunRequest(name="demo"))
    assert again.run.status == types.RUN_STATUS_CLOSED
    learner.detach()


async def test_a_draft_has_no_name_to_delete(stubs: Stubs) -> None:
    tensors, fragments = plan_messages()
    request = runs.CreateRunRequest(request_id="1" * 32, name="demo", tensors=tensors, fragments=fragments)
    draft = (await stubs.runs.CreateRun(request)).run
    with refused("RUN_NOT_FOUND", grpc.StatusCode.NOT_FOUND):
        await stubs.runs.DeleteRun(runs.DeleteRunRequest(name="demo", run_uid=draft.uid))
    found = await stubs.runs.GetRun(runs.GetRunRequest(name="demo", run_uid=draft.uid))
    assert found.run.status == types.RUN_STATUS_DRAFT


async def test_a_deleted_run_gives_its_name_to_another(stubs: Stubs) -> None:
    older, _ = await create_run(stubs, seed=1)
    request = runs.DeleteRunRequest(name="demo", run_uid=older.uid)
    await stubs.runs.DeleteRun(request)
    await stubs.runs.DeleteRun(request)
    with refused("RUN_NOT_FOUND", grpc.StatusCode.NOT_FOUND):
        await stubs.runs.GetRun(runs.GetRunRequest(name="demo"))
    newer, _ = await create_run(stubs, seed=2)
    assert newer.uid != older.uid
    with refused("RUN_REPLACED", PRECONDITION):
        await stubs.runs.DeleteRun(request)
    with refused("RUN_REPLACED", PRECONDITION) as caught:
        await RawLearner(stubs, older, "eu", random.Random(1)).attach()
    assert caught.refusal.metadata["run_uid"] == newer.uid


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": ""},
        {"name": "x" * 513},
        {"name": "base", "shape": [-1]},
        {"name": "base", "digest": b"short"},
        {"name": "body.0"},
    ],
)
async def test_malformed_untrained_tensors_are_refused(stubs: Stubs, wrong: dict[str, Any]) -> None:
    tensors, fragments = plan_messages()
    tensors[0].name = fragments[0].tensors[0] = "body.0"
    request = runs.CreateRunRequest(request_id="1" * 32, name="demo", tensors=tensors, fragments=fragments)
    request.untrained.add(**wrong)
    with refused("SHAPE_MISMATCH", grpc.StatusCode.INVALID_ARGUMENT):
        await stubs.runs.CreateRun(request)


async def test_a_listing_has_what_was_changed_before_it(stubs: Stubs) -> None:
    for number in range(3):
        await create_run(stubs, f"run{number}", seed=number)
        listed = (await stubs.runs.ListRuns(runs.ListRunsRequest())).runs
        assert [one.name for one in listed] == [f"run{at}" for at in range(number + 1)]
    policy = types.Policy(inner_step_count=77)
    changed = runs.SetPolicyRequest(name="run1", request_id=hex_id(random.Random(1)), policy=policy)
    await stubs.runs.SetPolicy(changed)
    await stubs.runs.DeleteRun(runs.DeleteRunRequest(name="run2", run_uid=listed[2].uid))
    listed = (await stubs.runs.ListRuns(runs.ListRunsRequest())).runs
    assert [(one.name, one.policy.inner_step_count) for one in listed] == [("run0", 4), ("run1", 77)]


async def test_of_many_learners_an_answer_has_the_live_ones(server: SyncerServer, stubs: Stubs) -> None:
    run, _ = await create_run(stubs)
    log = (await server.host.open("demo")).log
    await log.append([SessionItem(f"n{number}", f"{number:032x}", "") for number in range(5000)])
    learner = RawLearner(stubs, run, "us", random.Random(1))
    await learner.attach()
    seen = (await stubs.runs.GetRun(runs.GetRunRequest(name="demo"))).learners
    assert (len(seen), [one.learner_id for one in seen if one.is_live]) == (256, ["us"])
    learner.detach()
