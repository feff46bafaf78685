"""Where the quality benchmark trains."""

from __future__ import annotations

import pytest

from benchmarks.quality.task import DEVICE_VARIABLE, Inner, InnerTraining


def test_models_are_on_the_device_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {weight.device.type for weight in InnerTraining(Inner(1e-2, 1), seed=0).model.parameters()} == {"cpu"}
    monkeypatch.setenv(DEVICE_VARIABLE, "meta")
    assert {weight.device.type for weight in InnerTraining(Inner(1e-2, 1), seed=0).model.parameters()} == {"meta"}
