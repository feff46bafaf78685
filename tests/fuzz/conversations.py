"""Right conversations with a syncer, made wrong: fields, order, repetition, cuts and sizes of their messages.

A finding is an answer without a reason of this project's, INTERNAL, an error in the syncer's log, a call that is not
answered in time, or a syncer that no longer merges an honest learner's delta after all of it. And the other way round:
a learner whose syncer's answers are changed trains on, without a defect in its log and in bounded time and memory, and
exchanges again once they are right.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import resource
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

import grpc
import numpy as np
import psutil
from google.protobuf.message import Message

from skerry.errors import SkerryError, is_transient
from skerry.exchange.boundary import Boundary
from skerry.exchange.loop import ExchangeLoop
from skerry.exchange.session import Calls
from skerry.exchange.settings import ExchangeSettings
from skerry.model.interface import ArrayParameters
from skerry.net.grpc_transport import GrpcTransport
from skerry.net.retry import Retry, RetrySettings
from skerry.runtime.clock import SystemClock
from skerry.runtime.identifiers import SystemEntropy
from skerry.runtime.workers import InlineWorkers
from skerry.v1 import exchange_pb2 as exchange
from skerry.v1 import runs_pb2
from skerry.v1 import types_pb2 as types
from skerry_syncer.server import serving
from skerry_syncer.store.objects.opening import open_objects
from tests.fuzz.campaign import Finding, Result
from tests.fuzz.mutations import mutated_bytes, mutated_message, pick
from tests.integration.syncer.conftest import LOCAL
from tests.support.heard_logs import Line, logs_told_to
from tests.support.quadratic import QUICK as QUADRATIC_POLICY
from tests.support.quadratic import Quadratic
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

R = TypeVar("R", bound=Message)
_ANSWERED_WITHIN_S: Final = 10.0
# Conversations with one run over one connection, which takes 128 at the same time; after them an honest delta must
# still be merged.
_A_RUN: Final = 200
# Learners that are misled at the same time: each waits more than it works.
_AT_ONCE: Final = 10
_MISLED_S: Final = 1.5  # for which each learner is misled
_LEAVES_WITHIN_S: Final = 15.0
_LEARNERS_BOUND_BYTES: Final = 2**30  # of all of them, beyond what the process has before
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


def _written(lines: Iterable[tuple[str, bytes]]) -> bytes:
    """Returns a conversation as a finding: on each line a message after its method or type."""
    return b"".join(f"{name} {data.hex()}\n".encode() for name, data in lines)


class _Complaints:
    """Collects the lines with a traceback that this process logs."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def __call__(self, line: Line) -> None:
        if line.get("exc_info"):
            self.found.append(f"logged {line['event']}: {line['exc_info'][1]!r:.100}")


async def _still_merges(stubs: Stubs, source: random.Random, number: int) -> None:
    run, _ = await create_run(stubs, name=f"honest-{number}")
    learner = RawLearner(stubs, run, "honest", source)
    await learner.attach()
    header = learner.header(await pull(stubs, run, "body"), "body")
    await learner.push(header, np.ones(layout("body").numel, np.float32))
    await learner.event("version_committed", timeout_s=10)
    learner.detach()


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
        learner.detach()


async def _against_syncer(seed: str, seconds: float, complaints: _Complaints) -> Result:
    result, source, seen = Result(), random.Random(seed), set[str]()
    end_s, size_bytes = time.monotonic() + seconds, psutil.Process().memory_info().rss
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
                for one in [wrong, *complaints.found]:
                    if one and one not in seen:
                        seen.add(one)
                        result.findings.append(Finding(one, _written((method, one) for one in data)))
                complaints.found.clear()
            await _still_merges(stubs, source, number)
    result.grown_bytes = psutil.Process().memory_info().rss - size_bytes
    return result


@contextlib.contextmanager
def _listening() -> Iterator[_Complaints]:
    complaints = _Complaints()
    logging.getLogger("grpc").setLevel(logging.CRITICAL)
    with logs_told_to(complaints, logging.WARNING):
        yield complaints


def against_syncer(seed: str, seconds: float) -> Result:
    """Returns what came of conversations with a syncer of this process over a real socket."""
    with _listening() as complaints:
        return asyncio.run(_against_syncer(seed, seconds, complaints))


class _Liar(GrpcTransport):
    """Changes some of a syncer's answers on their way to the learner."""

    def __init__(self, target: str, source: random.Random) -> None:
        super().__init__(target)
        self.source = source
        self.share = 0.0  # of the answers
        self.lies = 0
        self.told: list[Message] = []

    def _changed(self, answer: R) -> R:
        if self.source.random() >= self.share:
            return answer
        lie = mutated_message(self.source, answer)
        self.lies += 1
        self.told = [*self.told[-20:], lie]
        return lie

    async def ask(self, *arguments: Any, **options: Any) -> Any:
        return self._changed(await super().ask(*arguments, **options))

    async def _stream(self, *arguments: Any, **options: Any) -> AsyncGenerator[Any, None]:
        async with contextlib.aclosing(super()._stream(*arguments, **options)) as answers:
            async for answer in answers:
                yield self._changed(answer)


@contextlib.asynccontextmanager
async def _learner(liar: _Liar, number: int, share: float) -> AsyncIterator[tuple[ExchangeLoop, Callable[[], float]]]:
    problem = Quadratic()
    settings = ExchangeSettings(
        run=f"fit-{number}",
        learner_id="a",
        create=True,
        policy=QUADRATIC_POLICY,
        connect_timeout_s=2.0,
    )
    retry = RetrySettings(attempt_count=3, first_wait_s=0.01, longest_wait_s=0.05)
    loop = ExchangeLoop(
        Calls(liar, Retry(retry, random.Random(0), is_transient), timeout_s=2.0),
        ArrayParameters(problem.arrays),
        settings,
        workers=InlineWorkers(),
        entropy=SystemEntropy(),
        boundary=Boundary(SystemClock(), asyncio.get_running_loop().call_soon_threadsafe),
    )
    await loop.join()
    running = asyncio.ensure_future(loop.run())
    await loop.wait_attached()
    liar.share = share
    try:
        yield loop, problem.descend
        if running.done():
            running.result()
    finally:
        liar.share = 0.0
        await loop.leave()
        await running


async def _misled(liar: _Liar, number: int, until_s: float) -> tuple[bool, str]:
    """Trains against a liar; returns whether the learner went on, and what is wrong; empty: nothing."""
    try:
        async with _learner(liar, number, share=0.2) as (loop, descend):
            while time.monotonic() < until_s:
                loop.step(8, await asyncio.to_thread(descend))
    except SkerryError:
        return False, ""
    except Exception as error:  # noqa: BLE001 - what must not come
        return False, f"{type(error).__name__}: {_innermost(error)!r:.200}"
    finally:
        await liar.close()
    return True, ""


async def _against_learner(seed: str, seconds: float, complaints: _Complaints) -> Result:
    result = Result()
    numbers = itertools.count()
    end_s, size_bytes = time.monotonic() + seconds, _peak_bytes()

    async def mislead(port: int) -> None:
        while time.monotonic() < end_s:
            number = next(numbers)
            liar = _Liar(f"127.0.0.1:{port}", random.Random(f"{seed} {number}"))
            until_s = min(time.monotonic() + _MISLED_S, end_s)
            went_on, wrong = await _misled(liar, number, until_s)
            if not wrong and (late_s := time.monotonic() - until_s) > _LEAVES_WITHIN_S:
                wrong = f"left {late_s:.0f} s late"
            for complaint in [wrong, *complaints.found]:
                if complaint:
                    result.findings.append(Finding(complaint, _lies(liar.told)))
            complaints.found.clear()
            result.accepted += liar.lies if went_on else 1
            result.inputs += liar.lies

    async with serving(open_objects("memory://"), LOCAL) as server, asyncio.TaskGroup() as tasks:
        for _ in range(_AT_ONCE):
            tasks.create_task(mislead(server.port))
    result.grown_bytes = _peak_bytes() - size_bytes
    if result.grown_bytes > _LEARNERS_BOUND_BYTES:
        result.findings.append(Finding(f"{result.grown_bytes >> 20} MiB more", b""))
    return result


def _peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _lies(told: Iterable[Message]) -> bytes:
    return _written((type(lie).__name__, lie.SerializeToString()) for lie in told)


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def against_learner(seed: str, seconds: float) -> Result:
    """Returns what came of changing a syncer's answers to a learner."""
    with _listening() as complaints:
        return asyncio.run(_against_learner(seed, seconds, complaints))


TARGETS: Final = {"calls": against_syncer, "answers": against_learner}
