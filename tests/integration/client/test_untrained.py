"""Frozen parameters are compared with those of the run's creator; what is not synchronised is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from skerry import ArrayLearner, Learner, RefusedError, RunsClient
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
        found = {one.name: one for one in client.get_run("tuned").run.untrained}
    assert found.keys() == FROZEN | BUFFERS
    assert {name for name, one in found.items() if one.HasField("checksum")} == FROZEN
    assert (tuple(found["packed"].shape), found["packed"].dtype) == ((5,), "uint8")
    _attach(target, Adapted(), "another")


def _changed(model: Adapted) -> None:
    model.base.bias[1] += 1e-6


def _narrower(model: Adapted) -> None:
    model.base.bfloat16()


def _trained(model: Adapted) -> None:
    del model.packed


def _more(model: Adapted) -> None:
    model.extra = nn.Parameter(torch.zeros(1), requires_grad=False)


_OTHERS: list[tuple[Callable[[Adapted], None], str]] = [
    (_changed, r"differences=1 of 3, first=base\.bias has other values"),
    (
        _narrower,
        r"differences=2 of 3, first=base\.bias is bfloat16\[2\] here and float32\[2\] in the run",
    ),
    (_trained, "packed is only in the run"),
    (_more, "extra is only in the model"),
]


@pytest.mark.parametrize(("change", "said"), _OTHERS)
def test_another_frozen_part_is_refused_unless_it_is_allowed(
    target: str, change: Callable[[Adapted], None], said: str
) -> None:
    _attach(target, Adapted())
    other = Adapted()
    change(other)
    with pytest.raises(RefusedError, match=said) as refusal:
        _attach(target, other, "other")
    assert refusal.value.reason == "FROZEN_DIFFERS"
    warnings = _attach(target, other, "other", allow_other_frozen=True)
    assert any("differences" in line for line in warnings)


def test_frozen_parameters_may_be_allowed_to_differ_by_name(target: str) -> None:
    _attach(target, Adapted())
    other = Adapted()
    _changed(other)
    warnings = _attach(target, other, "other", allow_other_frozen=["base.bias"])
    assert any("first=base.bias has other values" in line.get("differences", "") for line in warnings)
    _trained(other)
    with pytest.raises(RefusedError, match="differences=1 of 3, first=packed is only in the run"):
        _attach(target, other, "other", allow_other_frozen=["base.bias"])


def test_buffers_are_named_when_a_learner_attaches_and_may_differ(target: str) -> None:
    for learner_id in ("us", "eu"):
        model = Adapted()
        if learner_id == "eu":
            model.norm.get_buffer("running_mean").add_(1)
        (said,) = _attach(target, model, learner_id)
        assert "each learner keeps its own values" in said["event"]
        assert (said["count"], set(said["names"])) == (3, BUFFERS)


def test_of_tensors_by_name_none_is_taken_for_frozen(target: str) -> None:
    model = Adapted()
    _attach(target, dict(model.state_dict()), "us")
    model.norm(torch.randn(4, model.norm.num_features))  # counts the batch
    _attach(target, dict(model.state_dict()), "eu")


def test_that_a_run_has_no_record_of_frozen_parameters_is_said(target: str) -> None:
    adapter = {name: tensor.detach().numpy() for name, tensor in Adapted().adapter.named_parameters()}
    arrays = {f"adapter.{name}": array for name, array in adapter.items()}
    ArrayLearner(arrays, target=target, run="tuned", learner_id="first", create=True).close()
    assert any("no record of frozen parameters" in line["event"] for line in _attach(target, Adapted()))


def test_a_model_without_anything_else_attaches_without_a_word(target: str) -> None:
    assert _attach(target, nn.Linear(2, 2)) == []


def test_a_parameter_that_is_not_in_memory_is_not_compared(target: str) -> None:
    _attach(target, Adapted())
    offloaded = Adapted()
    offloaded.base.to("meta")
    warnings = _attach(target, offloaded, "other")
    assert any(set(line.get("names", ())) & {"base.weight", "base.bias"} for line in warnings)
