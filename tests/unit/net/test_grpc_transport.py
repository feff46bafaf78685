"""What a failed call means: the class of its error, by the reason in its details or by its status."""

from __future__ import annotations

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc.aio import Metadata

from skerry import (
    RefusedError,
    RunExistsError,
    SkerryError,
    StopExchangingError,
    StoreLostError,
    TryAgainError,
    WorkRefusedError,
)
from skerry.net.grpc_transport import error_from_rpc


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
        ("BASE_STALE", WorkRefusedError),
        ("RUN_EXISTS", RunExistsError),
        ("DRAINING", TryAgainError),
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
