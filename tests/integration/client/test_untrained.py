"""Frozen parameters are compared with those of the run's creator; what is not synchronised is said."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from skerry import Learner, RefusedError, RunsClient
from tests.support.adapted import BUFFERS, FROZEN, Adapted
from tests.support.heard_logs import heard_logs


def _attach(
    target: str, model: nn.Module | dict[str, Any], learner_id: str = "us", **options: Any
) -> list[dict[str, Any]]:
    """Attaches and leaves, and returns the warnings."""
    with heard_logs() as logs:
        Learner(model, target=target, run="tuned", learner_id=learner_id, create=True, **options).close()
    return [dict(line) for line in logs if line["log_level"] == "warning"]


def test_a_run_records_the_rest_of_its_model_and_wrappers_do_not_matter(target: str) -> None:
    model = Adapted()
    _attach(target, nn.DataParallel(model))
    with RunsClient(target) as client:
        untrained = {tensor.name: tensor for tensor in client.get_run("tuned").run.untrained}
    assert untrained.keys() == FROZEN | BUFFERS
    assert {name for name, tensor in untrained.items() if tensor.HasField("checksum")} == FROZEN
    assert (tuple(untrained["packed"].shape), untrained["packed"].dtype) == ((5,), "uint8")
    _attach(target, Adapted(), "another")


def _with_other_values(model: Adapted) -> None:
    model.base.bias[1] += 1e-6


def _without_a_parameter(model: Adapted) -> None:
    del model.packed


_OTHERS: dict[str, Callable[[Adapted], object]] = {
    "differences=1 of 3, first=base.bias has other values": _with_other_values,
    "first=base.bias is bfloat16[2] here and float32[2] in the run": lambda model: model.base.bfloat16(),
    "packed is only in the run": _without_a_parameter,
    "extra is only in the model": lambda model: model.register_parameter(
        "extra", nn.Parameter(torch.zeros(1), requires_grad=False)
    ),
}


@pytest.mark.parametrize("difference", _OTHERS)
def test_another_frozen_part_is_refused_unless_it_is_allowed(target: str, difference: str) -> None:
    _attach(target, Adapted())
    other = Adapted()
    _OTHERS[difference](other)
    with pytest.raises(RefusedError, match=re.escape(difference)) as refusal:
        _attach(target, other, "other", allow_other_frozen=["norm.*"])
    assert refusal.value.reason == "FROZEN_DIFFERS"
    warnings = _attach(target, other, "other", allow_other_frozen=["base.*", "packed", "extra"])
    assert any(difference.removeprefix("differences=1 of 3, ") in str(line.get("differences")) for line in warnings)


def test_buffers_are_named_when_a_learner_attaches_and_may_differ(target: str) -> None:
    _attach(target, Adapted())
    model = Adapted()
    model.norm.get_buffer("running_mean").add_(1)
    (warning,) = _attach(target, model, "eu")
    assert "each learner keeps its own values" in warning["event"]
    assert (warning["count"], set(warning["names"])) == (3, BUFFERS)


def test_of_tensors_by_name_none_is_taken_for_frozen(target: str) -> None:
    model = Adapted()
    _attach(target, dict(model.state_dict()), "us")
    model.norm(torch.randn(4, model.norm.num_features))  # counts the batch
    _attach(target, dict(model.state_dict()), "eu")
