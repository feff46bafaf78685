"""Messages as JSON values."""

from __future__ import annotations

import math
from typing import Any

import pytest

from skerry import RefusedError
from skerry.cli.plain import to_json, to_line
from skerry.v1 import types_pb2 as v1


def test_what_a_message_leaves_out_is_left_out_and_what_is_at_its_default_is_there() -> None:
    assert to_json(v1.LearnerStatus(learner_id="us")) == {
        "learner_id": "us",
        "region": "",
        "is_live": False,
        "is_participating": False,
        "has_left": False,
        "fates": [],
    }
    assert to_json(v1.Event(position=7)) == {"position": 7}


def test_values_are_words_seconds_hexadecimal_and_iso_times() -> None:
    version = v1.FragmentVersion(fragment="head", version=3, digest=b"\x01\xff")
    run = v1.Run(name="demo", status=v1.RUN_STATUS_CLOSING, versions=[version])
    run.created_at.FromSeconds(1_790_000_000)
    values: dict[str, Any] = to_json(run)
    assert (values["status"], values["created_at"]) == ("closing", "2026-09-21T14:13:20Z")
    assert values["versions"] == [{"fragment": "head", "version": 3, "digest": "01ff"}]
    assert "packed_layout" not in values
    report = v1.LearnerReport(loss=math.nan)
    report.step_time.FromMilliseconds(35)
    assert (
        to_line({name: to_json(report)[name] for name in ("step_time_s", "loss")})
        == '{"step_time_s":0.035,"loss":null}'
    )


def test_values_of_later_versions_are_unspecified_or_refused_by_name() -> None:
    assert to_json(v1.Run(status=99))["status"] == "unspecified"  # type: ignore[arg-type]  # from the wire
    with pytest.raises(RefusedError, match="merge rule"):
        to_json(v1.Run(policy=v1.Policy(merge=99)))  # type: ignore[arg-type]  # likewise
