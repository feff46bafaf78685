"""Records mirror the contract's messages, field by field."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from typing import Any

import pytest

from skerry import RefusedError
from skerry.net import records
from skerry.net.records import (
    Capabilities,
    DeltaFate,
    Event,
    Fate,
    LearnerReport,
    LearnerStatus,
    Run,
    RunStatus,
    RunView,
    record_of,
)
from skerry.v1 import capabilities_pb2, exchange_pb2, runs_pb2
from skerry.v1 import types_pb2 as v1
from skerry.wire import Codec
from skerry.wire.messages import policy_to_message
from skerry.wire.policy import Policy

MESSAGES: dict[type, Any] = {
    RunView: exchange_pb2.WatchStart,
    Capabilities: capabilities_pb2.GetCapabilitiesResponse,
    records.VersionRecord: runs_pb2.VersionRecord,
}
RECORDS = [
    kind for kind in vars(records).values() if dataclasses.is_dataclass(kind) and kind.__module__ == records.__name__
]


@pytest.mark.parametrize("kind", RECORDS)
def test_every_record_has_the_fields_of_its_message(kind: Any) -> None:
    message = MESSAGES.get(kind) or getattr(v1, kind.__name__)
    names = [field.name.removesuffix("_s") for field in dataclasses.fields(kind)]
    # What is packed is unpacked into other fields.
    assert names == [field.name for field in message.DESCRIPTOR.fields if field.name != "packed_layout"]
    record_of(kind, message())  # every type of field is known


def test_a_run_keeps_every_value() -> None:
    message = v1.Run(
        name="demo",
        uid="0" * 32,
        status=v1.RUN_STATUS_CLOSING,
        tensors=[v1.Tensor(name="w", shape=[2, 3], dtype="bfloat16")],
        versions=[v1.FragmentVersion(fragment="head", version=3, digest=b"d")],
        policy=policy_to_message(Policy(quorum_count=3), has_derived=False),
    )
    message.created_at.FromSeconds(1_790_000_000)
    run = record_of(Run, message)
    assert (run.name, run.status, run.policy) == ("demo", RunStatus.CLOSING, Policy(quorum_count=3))
    assert (run.tensors[0].shape, run.versions[0].digest) == ((2, 3), b"d")
    assert run.created_at == datetime.fromtimestamp(1_790_000_000, UTC)


def test_what_a_learner_has_not_said_is_none() -> None:
    message = v1.LearnerReport(step_count=4)
    message.step_time.FromMilliseconds(35)
    assert record_of(LearnerReport, message) == LearnerReport(step_count=4, step_time_s=0.035)
    assert record_of(LearnerStatus, v1.LearnerStatus(learner_id="us")).report is None


def test_an_event_says_what_kind_it_is() -> None:
    accepted = v1.DeltaFate(delta_id="d", fate=v1.FATE_PENDING)
    event = record_of(Event, v1.Event(position=7, delta_accepted=accepted))
    assert (event.kind, event.delta_accepted) == ("delta_accepted", DeltaFate(delta_id="d", fate=Fate.PENDING))
    assert record_of(Event, v1.Event(position=7)).kind == ""


def test_values_of_later_versions_are_passed_over_or_refused_by_name() -> None:
    assert record_of(Run, v1.Run(status=99)).status is RunStatus.UNSPECIFIED  # type: ignore[arg-type]  # from the wire
    codecs = capabilities_pb2.GetCapabilitiesResponse(codecs=[v1.CODEC_INT4, 99])  # type: ignore[list-item]  # likewise
    assert record_of(Capabilities, codecs).codecs == (Codec.INT4,)
    with pytest.raises(RefusedError, match="merge rule") as refusal:
        record_of(Run, v1.Run(policy=v1.Policy(merge=99)))  # type: ignore[arg-type]  # likewise
    assert refusal.value.reason == "BAD_ANSWER"
