"""Right conversations with a syncer, made wrong: fields, order, repetition, cuts and sizes of their messages.

A finding is an answer without a reason of this project's, INTERNAL, an error in the syncer's log, a call that is not
answered in time, or a syncer that no longer merges an honest learner's delta after all of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final
from unittest.mock import patch

import grpc
import numpy as np
from google.protobuf.message import Message

from skerry.v1 import exchange_pb2 as exchange
from skerry.v1 import runs_pb2
from skerry.v1 import types_pb2 as types
from skerry_syncer.access import limits
from skerry_syncer.server import serving
from skerry_syncer.store.objects.opening import open_objects
from tests.fuzz.campaign import Finding, Result
from tests.fuzz.mutations import mutated_bytes, mutated_message, pick
from tests.integration.syncer.conftest import LOCAL
from tests.support.heard_logs import Line, logs_told_to
from tests.support.raw_learner import (
    FLOAT32,
    INT4,
    Pulled,
    RawLearner,
    Stubs,
    connected,
    create_run,
    hex_id,
    layout,
    plan_messages,
    pull,
    push_messages,
    refusal_of,
)

_ANSWERED_WITHIN_S: Final = 10.0
# Conversations with one run over one connection, which takes 128 at the same time; after them an honest delta must
# still be merged.
_A_RUN: Final = 200
# gRPC's own, where it ends a call by itself.
_OF_GRPC: Final = frozenset({"Internal error from Core", "Exception iterating requests!"})
_METHODS: Final[dict[str, Any]] = {
    f"{service.name}/{method.name}": method
    for module in (exchange, runs_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
Conversation = tuple[str, Sequence[Message]]


def _right_conversations(source: random.Random, run: types.Run, learner: RawLearner, base: Any) -> list[Conversation]:
    tensors, fragments = plan_messages()
    named: dict[str, Any] = {"name": run.name, "run_uid": run.uid}
    of_run: dict[str, Any] = {"run": run.name, "run_uid": run.uid, "seen_position": run.position}
    values = np.random.default_rng(1).standard_normal(layout("body").numel).astype(np.float32)
    header = learner.header(base, "body")
    parts = pick(source, (((0, 1240),), ((0, 768), (768, 472))))
    hello = RawLearner(learner.stubs, run, f"l{source.randrange(30)}", source).hello()
    report = types.LearnerReport(step_count=5, token_count=50, loss=1.0)
    report.step_time.FromMilliseconds(10)
    return [
        ("Runs/GetRun", [runs_pb2.GetRunRequest(**named)]),
        ("Runs/ListRuns", [runs_pb2.ListRunsRequest(page_size=10)]),
        ("Runs/ListVersions", [runs_pb2.ListVersionsRequest(**named, fragment="body", page_size=10)]),
        ("Runs/SetPolicy", [runs_pb2.SetPolicyRequest(**named, request_id=hex_id(source), policy=run.policy)]),
        (
            "Runs/ReportMetrics",
            [
                runs_pb2.ReportMetricsRequest(
                    **named, request_id=hex_id(source), position=run.position, judge="eval", metrics={"loss": 3.25}
                )
            ],
        ),
        ("Runs/RollBack", [runs_pb2.RollBackRequest(**named, request_id=hex_id(source), target_position=run.position)]),
        ("Runs/CommitRun", [runs_pb2.CommitRunRequest(**named)]),
        (
            "Runs/CreateRun",
            [
                runs_pb2.CreateRunRequest(
                    request_id=hex_id(source), name="other", tensors=tensors, fragments=fragments, policy=run.policy
                )
            ],
        ),
        ("Exchange/QueryPush", [exchange.QueryPushRequest(**of_run, fragment="body", delta_id=header.delta_id)]),
        ("Exchange/PullFragment", [exchange.PullFragmentRequest(**of_run, fragment="body", is_newest=True)]),
        ("Exchange/Watch", [exchange.WatchRequest(run=run.name, run_uid=run.uid)]),
        *[
            ("Exchange/PushDelta", list(push_messages(header, values, encoding, parts=parts)))
            for encoding in (FLOAT32, INT4, INT4)
        ],
        (
            "Exchange/Attach",
            [
                exchange.AttachRequest(hello=hello),
                exchange.AttachRequest(report=report),
                exchange.AttachRequest(leave=exchange.Leave()),
            ],
        ),
    ]


def _wrong(source: random.Random, messages: Sequence[Message]) -> list[bytes]:
    """Returns the messages as bytes, some of them changed, repeated, dropped or in another place."""
    changed = list(messages)
    for _ in range(1 + int(source.random() ** 2 * 3)):
        at = int(source.random() * len(changed))
        match int(source.random() * 10):
            case 0 if len(changed) > 1:
                del changed[at]
            case 1:
                changed.insert(int(source.random() * len(changed)), changed[at])
            case 2 if len(changed) > 1:
                changed = changed[at:] + changed[:at]
            case 3:
                changed[at:at] = [changed[at]] * pick(source, (2, 20))
            case _:
                changed[at] = mutated_message(
                    source, changed[at], [m for m in messages if type(m) is type(changed[at])]
                )
    data = [message.SerializeToString() for message in changed]
    if source.random() < 0.1:
        at = int(source.random() * len(data))
        data[at] = mutated_bytes(source, data[at]) if source.random() < 0.9 else data[at] + bytes(2**21)
    return data


async def _say(stubs: Stubs, method: str, data: list[bytes]) -> tuple[str, str]:
    """Holds one conversation; returns why it was refused, and what is wrong with its end; empty: not, and nothing."""
    sends_stream, gets_stream = _METHODS[method].client_streaming, _METHODS[method].server_streaming
    kind = "_".join("stream" if is_stream else "unary" for is_stream in (sends_stream, gets_stream))
    call = getattr(stubs.channel, kind)(f"/skerry.v1.{method}", None, None)
    is_endless = method in {"Exchange/Watch", "Exchange/Attach"}
    timeout_s = 0.05 if is_endless else _ANSWERED_WITHIN_S
    try:
        answer = call(iter(data) if sends_stream else data[0], timeout=timeout_s)
        if gets_stream:
            async for _ in answer:
                pass
        else:
            await answer
    except asyncio.CancelledError:  # gRPC's own word for messages that the other side did not want any more
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        return "CANCELLED", ""
    except grpc.aio.AioRpcError as error:
        if error.details() in _OF_GRPC or (is_endless and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED):
            return "", ""
        try:
            refusal = refusal_of(error)
        except AssertionError:
            return error.code().name, f"{method}: {error.code()} without a reason: {error.details()!r:.100}"
        is_wrong = refusal.reason in {"INTERNAL", "STORE_UNAVAILABLE"}
        return refusal.reason, f"{method}: {refusal.reason}" if is_wrong else ""
    return "", ""


async def _still_merges(stubs: Stubs, source: random.Random, number: int) -> None:
    run, _ = await create_run(stubs, name=f"honest-{number}")
    learner = RawLearner(stubs, run, "honest", source)
    await learner.attach()
    header = learner.header(await pull(stubs, run, "body"), "body")
    await learner.push(header, np.ones(layout("body").numel, np.float32))
    await learner.event("version_committed")
    learner.call.cancel()


@contextlib.asynccontextmanager
async def _scene(source: random.Random) -> AsyncIterator[tuple[Stubs, types.Run, RawLearner, Pulled]]:
    """Yields a connection to a syncer with a run and a learner that is attached, and the run's first weights.

    The same source makes the same ids.
    """
    async with serving(open_objects("memory://"), LOCAL) as server, connected(server.port) as stubs:
        run, _ = await create_run(stubs)
        learner = RawLearner(stubs, run, "here", source)
        await learner.attach()
        yield stubs, run, learner, await pull(stubs, run, "body")
        learner.call.cancel()


async def _against_syncer(seed: str, seconds: float, complaints: list[str]) -> Result:
    result, source, seen = Result(), random.Random(seed), set[str]()
    end_s = time.monotonic() + seconds
    for number in itertools.count():
        if time.monotonic() > end_s:
            break
        async with _scene(source) as (stubs, run, learner, base):
            for _ in range(_A_RUN):
                method, messages = pick(source, _right_conversations(source, run, learner, base))
                data = _wrong(source, messages)
                reason, wrong = await _say(stubs, method, data)
                result.inputs += 1
                result.accepted += not reason
                for finding in [wrong, *complaints]:
                    if finding and finding not in seen:
                        seen.add(finding)
                        lines = [f"{method} {message.hex()}\n" for message in data]
                        result.findings.append(Finding(finding, "".join(lines).encode()))
                complaints.clear()
            await _still_merges(stubs, source, number)
    return result


def against_syncer(seed: str, seconds: float) -> Result:
    """Returns what came of conversations with a syncer of this process over a real socket."""
    complaints: list[str] = []

    def hear(line: Line) -> None:
        if line.get("exc_info"):
            complaints.append(f"logged {line['event']}: {line['exc_info'][1]!r:.100}")

    logging.getLogger("grpc").setLevel(logging.CRITICAL)
    # Else most conversations would be refused as too many.
    with logs_told_to(hear, logging.WARNING), patch.object(limits, "CALLS_A_SECOND", 1_000_000):
        return asyncio.run(_against_syncer(seed, seconds, complaints))
