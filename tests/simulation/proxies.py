"""What something between a learner and a replica answers by itself: a proxy, a firewall, gRPC, another service."""

from __future__ import annotations

import random
from typing import Final

from google.rpc import code_pb2, error_details_pb2, status_pb2

_CODES: Final = tuple(code for _, code in sorted(code_pb2.Code.items()) if code != code_pb2.OK)
_STREAMS: Final = frozenset({"Attach", "PullFragment"})  # OK ends these without a message
_DOMAINS: Final = ("googleapis.com", "skerry.example", "SKERRY", "")
_REASONS: Final = ("BASE_STALE", "BASE_REPEATED", "BAD_REQUEST", "NON_FINITE", "RUN_CLOSED", "SESSION_FENCED")


def foreign_status(method: str, source: random.Random) -> status_pb2.Status | None:
    """Returns any status, some with details that look like a syncer's; None for OK."""
    if method in _STREAMS and source.random() < 0.2:
        return None
    status = status_pb2.Status(code=source.choice(_CODES), message="not from a replica")
    if source.random() < 0.5:
        info = error_details_pb2.ErrorInfo(domain=source.choice(_DOMAINS), reason=source.choice(_REASONS))
        status.details.add().Pack(info)
    return status
