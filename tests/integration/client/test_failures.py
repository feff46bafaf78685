"""What a failed call becomes, and how it is repeated."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc.aio import Metadata

from skerry import (
    RefusedError,
    RetrySettings,
    RunExistsError,
    SkerryError,
    StopExchangingError,
    StoreLostError,
    TryAgainError,
    WorkRefusedError,
)
from skerry.errors import error_of, is_transient
from skerry.net.grpc_transport import GrpcTransport, error_from_rpc
from skerry.net.retry import Retry
from skerry.v1 import capabilities_pb2, exchange_pb2, runs_pb2


def rpc_error(code: grpc.StatusCode, *details: object) -> grpc.aio.AioRpcError:
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)  # type: ignore[arg-type]  # every detail is a message
    status = status_pb2.Status(code=code.value[0], message="as the server says", details=packed)
    trailing = Metadata(("grpc-status-details-bin", status.SerializeToString()))
    return grpc.aio.AioRpcError(code, Metadata(), trailing, "as the server says", "")


def test_the_reason_decides_the_class_and_the_server_says_when_to_retry() -> None:
    info = error_details_pb2.ErrorInfo(domain="skerry", reason="STORE_UNAVAILABLE", metadata={"store": "s3"})
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromMilliseconds(1500)
    error = error_from_rpc(rpc_error(grpc.StatusCode.UNAVAILABLE, info, retry))
    assert isinstance(error, TryAgainError)
    assert (error.reason, error.retry_after_s, error.metadata) == ("STORE_UNAVAILABLE", 1.5, {"store": "s3"})
    assert str(error) == "as the server says"


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("SESSION_FENCED", StopExchangingError),
        ("STORE_ROLLED_BACK", StoreLostError),
        ("NEWER_FORMAT", TryAgainError),
        ("OBJECT_UNREADABLE", TryAgainError),
        ("RUN_OPENING", TryAgainError),
        ("BASE_STALE", WorkRefusedError),
        ("RUN_EXISTS", RunExistsError),
        ("DRAINING", TryAgainError),
        ("TOO_SLOW", TryAgainError),
    ],
)
def test_every_reason_says_what_to_do(reason: str, kind: type[SkerryError]) -> None:
    info = error_details_pb2.ErrorInfo(domain="skerry", reason=reason)
    assert type(error_from_rpc(rpc_error(grpc.StatusCode.FAILED_PRECONDITION, info))) is kind


def test_details_of_others_are_not_taken_for_ours() -> None:
    for domain in ("elsewhere", "SKERRY", "skerry.example", ""):
        info = error_details_pb2.ErrorInfo(domain=domain, reason="RUN_CLOSED")
        assert error_from_rpc(rpc_error(grpc.StatusCode.UNAVAILABLE, info)).reason == "UNREACHABLE"


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_no_status_without_a_reason_refuses_a_push(code: grpc.StatusCode) -> None:
    foreign = error_details_pb2.ErrorInfo(domain="elsewhere", reason="BASE_STALE")
    for error in (rpc_error(code), rpc_error(code, foreign)):
        assert type(error_from_rpc(error, unknown=TryAgainError)) is TryAgainError


def test_a_reason_of_a_later_version_does_not_refuse_a_push() -> None:
    info = error_details_pb2.ErrorInfo(domain="skerry", reason="TOO_MANY_MOONS")
    error = error_from_rpc(rpc_error(grpc.StatusCode.FAILED_PRECONDITION, info), unknown=TryAgainError)
    assert type(error) is TryAgainError
    assert error.reason == "TOO_MANY_MOONS"


def test_a_status_without_a_reason_is_a_refusal_except_of_a_push() -> None:
    assert type(error_from_rpc(rpc_error(grpc.StatusCode.UNIMPLEMENTED))) is RefusedError
    info = error_details_pb2.ErrorInfo(domain="skerry", reason="BAD_REQUEST")
    refusal = rpc_error(grpc.StatusCode.INVALID_ARGUMENT, info)
    assert type(error_from_rpc(refusal, unknown=TryAgainError)) is RefusedError


class FailingCall:
    """Fails with these errors one after another, and then answers."""

    def __init__(self, *errors: SkerryError) -> None:
        self.errors = list(errors)
        self.count = 0

    async def __call__(self) -> str:
        self.count += 1
        if self.errors:
            raise self.errors.pop(0)
        return "answer"


def not_now(retry_after_s: float = 0.0) -> SkerryError:
    return error_of("STORE_UNAVAILABLE", "not now", retry_after_s=retry_after_s)


def rule(attempt_count: int | None = 5, **hooks: Any) -> Retry:
    return Retry(RetrySettings(attempt_count=attempt_count), random.Random(0), is_transient, **hooks)


async def test_a_call_is_repeated_until_it_answers() -> None:
    call, heard = FailingCall(not_now(), not_now()), list[tuple[int, str]]()
    retry = rule(3, before_pause=lambda attempt, error: heard.append((attempt, str(error))))
    assert await retry.call(call) == "answer"
    assert heard == [(1, "not now"), (2, "not now")]


async def test_a_call_is_repeated_within_its_bound() -> None:
    call = FailingCall(*[not_now()] * 9)
    with pytest.raises(TryAgainError):
        await rule(4).call(call)
    assert call.count == 4


async def test_a_failure_after_progress_counts_as_the_first() -> None:
    call = FailingCall(*[not_now()] * 9)
    with pytest.raises(TryAgainError):
        await rule(4, has_progressed=lambda: call.count == 3).call(call)
    assert call.count == 6


async def test_no_attempt_begins_after_the_timeout() -> None:
    call = FailingCall(not_now(), not_now(retry_after_s=30.0), not_now())
    with pytest.raises(TryAgainError):
        await rule(None).call(call, timeout_s=20.0)
    assert call.count == 2


async def test_a_refusal_is_not_repeated() -> None:
    call = FailingCall(error_of("BAD_REQUEST", "never"))
    with pytest.raises(SkerryError, match="never"):
        await rule().call(call)
    assert call.count == 1


def test_a_thread_repeats_by_the_same_rule() -> None:
    waits: list[float] = []

    def call() -> None:
        for attempt in rule(None).attempts(sleep=waits.append, is_late=lambda pause_s: len(waits) == 3):
            with attempt:
                raise not_now(retry_after_s=2.0)

    with pytest.raises(TryAgainError):
        call()
    assert [round(wait_s) for wait_s in waits] == [2, 2, 2]


def test_pauses_grow_to_their_limit_and_the_server_wins() -> None:
    settings, jitter = RetrySettings(first_wait_s=1.0, longest_wait_s=8.0), random.Random(0)
    error = error_of("UNREACHABLE", "gone")
    for attempt, longest_s in ((1, 1.0), (2, 2.0), (3, 4.0), (9, 8.0), (10_000, 8.0)):
        assert longest_s / 2 <= settings.wait_s(attempt, error, jitter) <= longest_s
    told = error_of("STORE_FULL", "full", retry_after_s=30.0)
    assert 30.0 <= settings.wait_s(1, told, jitter) <= 37.5


async def test_a_call_whose_messages_fail_raises_their_error_and_is_no_cancellation_of_who_waits(target: str) -> None:
    async def attaching() -> AsyncIterator[exchange_pb2.AttachRequest]:
        yield exchange_pb2.AttachRequest(hello=exchange_pb2.Hello(run="fit"))
        raise ValueError("nothing to report")

    async def pushing() -> AsyncIterator[exchange_pb2.PushDeltaRequest]:
        yield exchange_pb2.PushDeltaRequest(header=exchange_pb2.PushHeader())
        raise ValueError("nothing to push")

    transport = GrpcTransport(target)
    with pytest.raises(ValueError, match="nothing to report"):
        [answer async for answer in transport.attach(attaching())]
    with pytest.raises(ValueError, match="nothing to push"):
        await transport.push_delta(pushing())
    await transport.close()


@pytest.mark.parametrize("targets", ["{0}", "{0},{0}"], ids=["one target", "several"])
async def test_every_call_of_closed_connections_says_so(target: str, targets: str) -> None:
    transport = GrpcTransport(targets.format(target))
    await transport.close()

    async def nothing() -> AsyncIterator[Any]:
        return
        yield

    async def first(answers: AsyncIterator[Any]) -> None:
        await anext(answers)

    calls: tuple[Callable[[], Awaitable[Any]], ...] = (
        lambda: first(transport.attach(nothing())),
        lambda: first(transport.pull_fragment(exchange_pb2.PullFragmentRequest())),
        lambda: first(transport.watch(exchange_pb2.WatchRequest())),
        lambda: transport.push_delta(nothing()),
        lambda: transport.query_push(exchange_pb2.QueryPushRequest(), timeout_s=1.0),
        lambda: transport.get_run(runs_pb2.GetRunRequest(), timeout_s=1.0),
        lambda: transport.get_capabilities(capabilities_pb2.GetCapabilitiesRequest(), timeout_s=1.0),
        lambda: transport.create_run(runs_pb2.CreateRunRequest(), timeout_s=1.0),
        lambda: transport.commit_run(runs_pb2.CommitRunRequest(), timeout_s=1.0),
    )
    for call in calls:
        with pytest.raises(TryAgainError, match="closed"):
            await call()
