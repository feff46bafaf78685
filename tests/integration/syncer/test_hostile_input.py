"""What a hostile client sends gets a short refusal with a reason: no traceback, no class names, nothing it can use."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from skerry.runtime.logs import get_logger, log_to_stderr
from skerry.v1 import exchange_pb2 as exchange
from skerry.v1 import runs_pb2 as runs
from tests.support.heard_logs import heard_logs
from tests.support.raw_learner import (
    FLOAT32,
    RawLearner,
    Stubs,
    create_run,
    layout,
    part_messages,
    pull,
    refused,
)

INVALID = grpc.StatusCode.INVALID_ARGUMENT
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
FAR = 2**62
MALFORMED = b"\x0a\xff"  # a string whose end is missing
_UNARY = ("Runs/GetRun", "Runs/CreateRun", "Runs/ListRuns", "Exchange/QueryPush", "Capabilities/GetCapabilities")
_STREAMS = ("Exchange/PushDelta", "Exchange/Attach")


@pytest.fixture(autouse=True)
def logs(quiet_logs: None) -> Iterator[list[Any]]:
    with heard_logs() as lines:
        yield lines


def _raw(data: bytes) -> bytes:
    return data


def _tracebacks(logs: list[Any]) -> list[Any]:
    return [line for line in logs if line.get("exc_info")]


@pytest.mark.parametrize("method", _UNARY)
async def test_a_message_that_is_no_protobuf_is_a_bad_request(stubs: Stubs, method: str, logs: list[Any]) -> None:
    call = stubs.channel.unary_unary(f"/skerry.v1.{method}", _raw, _raw)
    with refused("BAD_REQUEST", INVALID) as caught:
        await call(MALFORMED)
    assert "class" not in caught.refusal.message
    assert not _tracebacks(logs)


@pytest.mark.parametrize("method", ["Exchange/Watch", "Exchange/PullFragment"])
async def test_so_it_is_where_a_stream_answers(stubs: Stubs, method: str, logs: list[Any]) -> None:
    with refused("BAD_REQUEST", INVALID):
        async for _ in stubs.channel.unary_stream(f"/skerry.v1.{method}", _raw, _raw)(MALFORMED):
            pass
    assert not _tracebacks(logs)


@pytest.mark.parametrize("method", _STREAMS)
async def test_so_it_is_in_a_stream(stubs: Stubs, method: str, logs: list[Any]) -> None:
    with refused("BAD_REQUEST", INVALID):
        async for _ in stubs.channel.stream_stream(f"/skerry.v1.{method}", _raw, _raw)(iter([MALFORMED])):
            pass
    assert not _tracebacks(logs)


async def test_a_position_beyond_the_log_is_told_without_a_traceback(stubs: Stubs, logs: list[Any]) -> None:
    await create_run(stubs)
    with refused("STORE_ROLLED_BACK", grpc.StatusCode.DATA_LOSS):
        await stubs.runs.GetRun(runs.GetRunRequest(name="demo", seen_position=FAR))
    assert not _tracebacks(logs)


@pytest.mark.parametrize(
    "request_of",
    [
        lambda uid: exchange.PullFragmentRequest(run="demo", fragment="body", target_version=FAR),
        lambda uid: exchange.PullFragmentRequest(run="demo", fragment="body", from_version=FAR, is_newest=True),
        lambda uid: exchange.PullFragmentRequest(
            run="demo",
            fragment="body",
            from_version=-1,
            is_newest=True,
            resume=exchange.PullResume(object_index=2**30, offset=FAR, objects=["x"]),
        ),
    ],
)
async def test_numbers_beyond_the_log_of_a_pull_are_refused_in_peace(
    stubs: Stubs, request_of: Callable[[str], exchange.PullFragmentRequest], logs: list[Any]
) -> None:
    run, _ = await create_run(stubs)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stubs.exchange.PullFragment(request_of(run.uid)):
            pass
    assert caught.value.code() in {grpc.StatusCode.NOT_FOUND, INVALID, PRECONDITION}
    assert not _tracebacks(logs)


async def test_other_positions_beyond_the_log_are_refused_in_peace(stubs: Stubs, logs: list[Any]) -> None:
    await create_run(stubs)
    with refused("VERSION_NOT_FOUND", grpc.StatusCode.NOT_FOUND):
        async for _ in stubs.exchange.Watch(exchange.WatchRequest(run="demo", after_position=FAR)):
            pass
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stubs.runs.RollBack(runs.RollBackRequest(name="demo", request_id="1" * 32, target_position=FAR))
    assert caught.value.code() in {grpc.StatusCode.NOT_FOUND, INVALID}
    assert not _tracebacks(logs)


@pytest.mark.parametrize("kept", range(1, 6))
async def test_a_push_that_ends_anywhere_is_answered_in_peace(stubs: Stubs, kept: int, logs: list[Any]) -> None:
    run, _ = await create_run(stubs)
    learner = RawLearner(stubs, run, "cut", random.Random(7))
    await learner.attach()
    header = learner.header(await pull(stubs, run, "body"), "body")
    values = np.ones(layout("body").numel, np.float32)
    parts, _ = part_messages(values, layout("body"), FLOAT32, 0, len(values))
    messages = [exchange.PushDeltaRequest(header=header), *parts][:kept]
    answer = await stubs.exchange.PushDelta(iter(messages))
    assert answer.state == exchange.PUSH_STATE_PARTS_STORED
    assert not _tracebacks(logs)
    learner.detach()


async def test_a_foreign_base_is_not_told_the_right_digest(stubs: Stubs) -> None:
    run, _ = await create_run(stubs)
    learner = RawLearner(stubs, run, "thief", random.Random(7))
    await learner.attach()
    base = await pull(stubs, run, "body")
    header = learner.header(base, "body")
    header.base_digest = bytes(32)
    with refused("BASE_FOREIGN", PRECONDITION) as caught:
        await learner.push(header, np.ones(layout("body").numel, np.float32))
    assert base.plan.target.digest.hex() not in caught.refusal.message
    learner.detach()


async def test_a_long_name_comes_back_short(stubs: Stubs, logs: list[Any]) -> None:
    run, _ = await create_run(stubs)
    hello = RawLearner(stubs, run, "a", random.Random(7)).hello()
    for number in range(5):
        hello.tensors.add(name=f"{number}" + "n" * 200, shape=[1] * 50_000)
    with refused("SHAPE_MISMATCH", INVALID) as caught:
        await stubs.exchange.Attach(iter([exchange.AttachRequest(hello=hello)])).read()
    assert len(caught.refusal.message) <= 1024
    learner = RawLearner(stubs, run, "a", random.Random(7))
    await learner.attach()
    header = learner.header(await pull(stubs, run, "body"), "body")
    header.base_digest = bytes(500_000)
    with refused("BAD_REQUEST", INVALID):
        await learner.push(header, np.ones(1240, np.float32))
    learner.detach()


def test_what_a_client_chose_takes_little_room_in_the_log(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log_to_stderr()
    get_logger("skerry_syncer").info("call refused", message="n" * 1_000_000, count=3)
    said = capsys.readouterr().err
    assert "count=3" in said
    assert len(said) < 2_000
