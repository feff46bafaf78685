"""What a client is told of an error: the status, the reason, when to retry, and nothing of the server's inside."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from google.rpc import code_pb2, error_details_pb2, status_pb2

from skerry.v1 import types_pb2
from skerry.wire.layout import BadNameError
from skerry_syncer.errors import DrainingError, SyncerError
from skerry_syncer.rpc.status import status_of
from skerry_syncer.store.errors import StoreFullError, StoreUnavailableError

NEAR = {"similar_names": "demo"}


def told(status: status_pb2.Status) -> tuple[str, float | None, dict[str, str]]:
    """Returns the reason, the pause before a retry, and the metadata."""
    info, retry, retry_s = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo(), None
    for detail in status.details:
        detail.Unpack(info)
        if detail.Unpack(retry):
            retry_s = retry.retry_delay.ToTimedelta().total_seconds()
    assert info.domain == "skerry"
    return info.reason, retry_s, dict(info.metadata)


@pytest.mark.parametrize(
    ("error", "code", "reason", "retry_s"),
    [
        (SyncerError("RUN_NOT_FOUND", "no such run", metadata=NEAR), code_pb2.NOT_FOUND, "RUN_NOT_FOUND", None),
        (SyncerError("QUOTA_EXCEEDED", "", retry_after_s=0.25), code_pb2.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED", 0.25),
        (DrainingError(), code_pb2.UNAVAILABLE, "DRAINING", 0.5),
        (StoreUnavailableError("secret"), code_pb2.UNAVAILABLE, "STORE_UNAVAILABLE", 1.0),
        (StoreFullError("secret"), code_pb2.RESOURCE_EXHAUSTED, "STORE_FULL", 30.0),
        (BadNameError("bad name"), code_pb2.INVALID_ARGUMENT, "BAD_NAME", None),
        (KeyError("secret"), code_pb2.INTERNAL, "INTERNAL", None),
    ],
)
def test_an_error_has_its_code_its_reason_and_its_pause(
    error: Exception, code: int, reason: str, retry_s: float | None
) -> None:
    status = status_of(error)
    assert (status.code, *told(status)) == (code, reason, retry_s, getattr(error, "metadata", {}))
    assert "secret" not in str(status), "what happened inside is not told"


def test_every_reason_has_the_status_code_that_its_comment_in_the_contract_says() -> None:
    text = (Path(__file__).parents[4] / "protos" / "skerry" / "v1" / "types.proto").read_text("utf-8")
    codes = re.findall(r"  // ([A-Z_]+): .*\n(?:  //.*\n)*  ERROR_REASON_(\w+) = ", text)
    assert len(codes) == len(types_pb2.ErrorReason.keys()) - 1, "all but UNSPECIFIED"
    for code, reason in codes:
        assert code_pb2.Code.Name(status_of(SyncerError(reason, "")).code) == code


def test_a_long_message_is_cut_to_what_clients_take() -> None:
    assert len(status_of(SyncerError("BAD_REQUEST", "x" * 9000)).message) == 1000
