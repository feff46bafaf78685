"""Weights that something other than training replaces, moves or writes over are noticed, and nothing else is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from skerry.model.torch.parameters import CopyOf, TorchParameters
from skerry.wire import FragmentLayout
from tests.support.heard_logs import heard_logs


class _Layers(nn.Module):
    """A model with a layer that can be replaced, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.drop = nn.Dropout()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Parameter(torch.zeros(0))


def _warnings_of(parameters: TorchParameters) -> Sequence[Mapping[str, Any]]:
    with heard_logs() as logs:
        assert parameters.replaced() is None
        assert parameters.replaced() is None
    return logs


_REPLACEMENTS: dict[str, Callable[[_Layers], object]] = {
    "a state dict was loaded": lambda model: model.second.load_state_dict(nn.Linear(4, 4).state_dict()),
    "the model was moved or converted": lambda model: model.double(),
    "a parameter or layer was replaced": lambda model: model.load_state_dict(_Layers().state_dict(), assign=True),
    "parameter=second.bias": lambda model: setattr(model.second.bias, "data", torch.zeros(4)),
    "parameter=second.weight": lambda model: setattr(model, "second", nn.Linear(4, 4)),
}


@pytest.mark.parametrize("problem", _REPLACEMENTS)
def test_weights_that_are_replaced_are_noticed_at_the_next_step(problem: str) -> None:
    model = _Layers()
    parameters = TorchParameters(model)
    assert parameters.replaced() is None
    _REPLACEMENTS[problem](model)
    noticed = parameters.replaced() or ""
    assert problem in noticed
    assert "then attach; the run's weights win" in noticed


def test_a_tensor_that_another_one_replaces_is_noticed() -> None:
    tensors = {"w": torch.zeros(3), "b": torch.zeros(2)}
    parameters = TorchParameters(tensors)
    tensors["w"] += 1
    assert parameters.replaced() is None
    tensors["b"] = tensors["b"] - 0.1
    assert "parameter=b" in (parameters.replaced() or "")


def test_a_state_dict_that_is_loaded_after_an_adoption_is_noticed() -> None:
    model = _Layers()
    parameters = TorchParameters(model)
    layout = FragmentLayout("f", parameters.tensors)
    assert parameters.replaced() is None
    parameters.add(layout, np.ones(layout.numel, np.float32))()
    model.load_state_dict(_Layers().state_dict())
    assert "a state dict was loaded" in (parameters.replaced() or "")


def _loaded_and_taken_back(model: _Layers) -> None:
    own = copy.deepcopy(model.state_dict())
    model.load_state_dict(_Layers().state_dict())
    model.second.load_state_dict(nn.Linear(4, 4).state_dict())
    model.load_state_dict(own)


def _copied_and_taken_back_by_loading(model: _Layers) -> None:
    own = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        torch._foreach_zero_([*model.parameters()])
    model.load_state_dict(own)


_NOBODYS_BUSINESS: dict[str, Callable[[_Layers], object]] = {
    "a removed dropout": lambda model: delattr(model, "drop"),
    "a layer that is wrapped": lambda model: setattr(model, "second", nn.Sequential(nn.Dropout(), model.second)),
    "a compiled layer": lambda model: setattr(model, "second", torch.compile(model.second)),
    "pruned": lambda model: prune.identity(model.second, "weight"),  # type: ignore[no-untyped-call]
    "a frozen layer that is replaced": lambda model: setattr(model, "base", nn.Linear(4, 4).requires_grad_(False)),
    "a frozen layer's checkpoint": lambda model: model.base.load_state_dict(nn.Linear(4, 4).state_dict()),
    "frozen": lambda model: model.second.requires_grad_(False),
    "loaded and taken back": _loaded_and_taken_back,
    "copied and taken back by loading": _copied_and_taken_back_by_loading,
}


@pytest.mark.parametrize("how", _NOBODYS_BUSINESS)
def test_what_leaves_the_trained_tensors_as_they_were_is_nobodys_business(how: str) -> None:
    model = _Layers()
    parameters = TorchParameters(model)
    assert parameters.replaced() is None
    _NOBODYS_BUSINESS[how](model)
    parameters.look_again()
    assert _warnings_of(parameters) == []


def test_parameters_that_become_trainable_are_named_once() -> None:
    model = _Layers()
    parameters = TorchParameters(model)
    model.base.bias.requires_grad_(True)
    model.add_module("third", nn.Linear(4, 4))
    (warning,) = _warnings_of(parameters)
    assert "freeze afterwards what is to be trained later" in warning["event"]
    assert warning["names"] == ["base.bias", "third.weight", "third.bias"]


def test_a_module_that_is_attached_can_be_copied_and_pickled(tmp_path: Path) -> None:
    model = _Layers()
    parameters = TorchParameters(model)
    copied = copy.deepcopy(model)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    for other in (copied, loaded, averaged.module):
        other.load_state_dict(_Layers().state_dict())
    assert parameters.replaced() is None


# Optimizers, and by how much a change of the weights is larger than their steps.


def _masters_of(model: nn.Module) -> tuple[dict[torch.Tensor, torch.Tensor], Callable[[], object]]:
    """Returns float32 copies of the weights, and a step that descends on them and writes them over the weights."""
    copies: dict[torch.Tensor, torch.Tensor] = {
        weight: weight.detach().float().clone() for weight in model.parameters()
    }

    @torch.no_grad()
    def step() -> None:
        for weight, own in copies.items():
            assert weight.grad is not None
            weight.copy_(own.sub_(1e-3 * weight.grad.sign()))

    return copies, step


def _warnings_after_changes(
    model: nn.Module, step: Callable[[], object], copies: CopyOf | None = None, *, size: float
) -> list[str]:
    """Trains with a change of the weights by the exchange at every third step, and returns what was warned of."""
    generator = torch.Generator().manual_seed(1)
    parameters = TorchParameters(model, copies)
    layout = FragmentLayout("f", parameters.tensors)
    with heard_logs() as logs:
        for number in range(12):
            batch = torch.randn(16, 32, generator=generator).to(next(model.parameters()).dtype)
            (model(batch) - batch).square().mean().backward()
            step()
            model.zero_grad()
            assert parameters.replaced() is None
            if number % 3 == 0:
                parameters.add(layout, size * torch.randn(layout.numel, generator=generator).numpy())()
    return [str(line["event"]) for line in logs]


def _network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_that_writes_weights_of_its_own_over_the_runs_is_warned_of_once(dtype: torch.dtype) -> None:
    model = _network(dtype)
    _, step = _masters_of(model)
    (warning,) = _warnings_after_changes(model, step, size=0.1)
    assert "give copies=" in warning


def test_weights_that_an_optimizer_keeps_are_no_matter_where_they_change_too() -> None:
    model = _network(torch.bfloat16)
    copies, step = _masters_of(model)
    assert _warnings_after_changes(model, step, copies.__getitem__, size=0.1) == []


@pytest.mark.parametrize("size", [0.0, 1e-3, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "options"), [("SGD", {"lr": 1.0, "momentum": 0.95}), ("Adam", {"lr": 1e-3})])
def test_an_ordinary_optimizer_is_not_warned_of(
    kind: str, options: dict[str, float], dtype: torch.dtype, size: float
) -> None:
    model = _network(dtype)
    optimizer = getattr(torch.optim, kind)(model.parameters(), **options)
    assert _warnings_after_changes(model, optimizer.step, size=size) == []


def test_a_small_change_that_a_step_undoes_by_chance_is_not_warned_of() -> None:
    weight, bias = (nn.Parameter(torch.zeros(count)) for count in (64, 1))
    parameters = TorchParameters({"weight": weight, "bias": bias})
    layouts = [FragmentLayout(tensor.name, (tensor,)) for tensor in parameters.tensors]
    with heard_logs() as logs:
        for _ in range(3):
            for layout in layouts:
                parameters.add(layout, np.full(layout.numel, 1e-3, np.float32))()
                with torch.no_grad():
                    bias.zero_()
                assert parameters.replaced() is None
    assert list(logs) == []
