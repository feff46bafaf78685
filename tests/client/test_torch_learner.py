"""A stranger's module in a ten-line loop, and the weights of modules in general."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

from skerry.client import ArrayLearner, Learner, Policy
from skerry.client.errors import StopExchangingError
from skerry.client.parameters import ArrayParameters
from skerry.client.torch_parameters import TorchParameters
from skerry.wire import Codec, Encoding, FragmentLayout
from skerry.wire.frames import encode_frames
from skerry.wire.torch_codecs import encode_frames_torch

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


class StrangersModel(nn.Module):
    """Not ours: an embedding tied to its head, a convolution, a norm, and something frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, 8)
        self.mix = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 32, bias=False)
        self.head.weight = self.tokens.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(tokens)
        hidden = hidden + self.mix(hidden.transpose(1, 2)).transpose(1, 2)
        return self.head(self.norm(hidden))  # type: ignore[no-any-return]


def test_a_strangers_module_trains_in_ten_lines(target: str) -> None:
    torch.manual_seed(0)
    model = StrangersModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    policy = Policy(inner_step_count=4, lease_term_s=1.0)
    losses: list[float] = []

    with Learner(model, target=target, run="theirs", learner_id="home", create=True, policy=policy) as learner:
        while min(learner.stats.versions.values()) < 4:
            tokens = torch.randint(0, 32, (4, 16))
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            learner.step(tokens=tokens.numel(), loss=loss.item())
            losses.append(loss.item())
            assert len(losses) < 20_000

    assert np.mean(losses[-5:]) < losses[0]
    assert learner.failure is None
    assert learner.stats.deltas_merged > 0


def test_a_learner_of_a_module_has_every_option_of_one_of_arrays() -> None:
    ours, theirs = (dict(inspect.signature(kind).parameters) for kind in (Learner, ArrayLearner))
    del ours["model"], ours["process_group"], theirs["arrays"]
    assert ours == theirs


def test_tied_tensors_appear_once_and_frozen_ones_not_at_all() -> None:
    names = [tensor.name for tensor in TorchParameters(StrangersModel()).tensors]
    assert names == ["tokens.weight", "mix.weight", "mix.bias", "norm.weight", "norm.bias"]


def test_wrappers_do_not_change_names(one_process_group: None) -> None:
    plain = TorchParameters(StrangersModel()).tensors
    wrappings: list[Any] = [
        nn.DataParallel(StrangersModel()),
        nn.parallel.DistributedDataParallel(StrangersModel()),
        torch.compile(StrangersModel()),
        torch.compile(nn.parallel.DistributedDataParallel(torch.compile(StrangersModel()))),
    ]
    for wrapped in wrappings:
        assert TorchParameters(wrapped).tensors == plain
    inside = StrangersModel()
    inside.mix = torch.compile(inside.mix)  # type: ignore[assignment]  # torch says so too
    assert TorchParameters(inside).tensors == plain


@pytest.fixture
def one_process_group() -> Iterator[None]:
    """What DistributedDataParallel asks for."""
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_submodule_that_is_called_like_a_wrapper_s_keeps_its_name() -> None:
    model = nn.Linear(4, 3, bias=False)
    model.module = nn.Linear(2, 6, bias=False)
    model.module._orig_mod = nn.Linear(5, 1, bias=False)
    names = {tensor.name: tensor.numel for tensor in TorchParameters(model).tensors}
    assert names == {"weight": 12, "module.weight": 12, "module._orig_mod.weight": 5}


def test_two_parameters_of_one_name_are_refused_with_both_paths() -> None:
    wrapper = nn.DataParallel(nn.Linear(2, 2, bias=False))
    wrapper.register_parameter("weight", nn.Parameter(torch.zeros(3)))
    with pytest.raises(ValueError, match=r"first=weight, second=module\.weight.*pass a mapping"):
        TorchParameters(wrapper)


@pytest.mark.parametrize("model", [nn.Identity(), nn.Linear(2, 2).requires_grad_(False), {}])
def test_a_model_with_nothing_to_train_is_refused_with_the_reason(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="no trainable parameter"):
        TorchParameters(model)


def test_what_is_no_tensor_is_refused_with_what_to_give_instead(target: str) -> None:
    arrays: Any = {"w": np.zeros(3)}
    with pytest.raises(TypeError, match=r"for ArrayLearner, those of JAX for JaxLearner of .*name=w, type=ndarray"):
        TorchParameters(arrays)
    module: Any = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"a torch module is for Learner\. type=Linear"):
        ArrayLearner(module, target=target, run="fit", learner_id="us")


def test_parameters_on_several_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="one device"):
        TorchParameters({"a": torch.zeros(2), "b": torch.zeros(2, device="meta")})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_torch_and_numpy_weights_do_the_same(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "w": torch.randn(6, 5, generator=generator).to(dtype),
        "b": torch.randn(4, generator=generator).to(dtype),
    }
    arrays = {name: tensor.numpy().copy() for name, tensor in tensors.items()}
    ours, theirs = TorchParameters(tensors), ArrayParameters(arrays)
    assert ours.tensors == theirs.tensors
    assert ours.dtypes == theirs.dtypes
    layout = FragmentLayout("f", ours.tensors)
    values = np.random.default_rng(0).normal(size=layout.numel).astype(np.float32)
    for parameters in (ours, theirs):
        parameters.add(layout, values)()
        parameters.blend(layout, values, 0.25)()
        parameters.add(layout, values)()
    first, second = ours.buffer(layout), theirs.buffer(layout)
    ours.snapshot(layout, first)()
    theirs.snapshot(layout, second)()
    np.testing.assert_allclose(first, second, rtol=1e-3 if dtype == torch.float16 else 1e-6)
    assert ours.is_float32(layout) == theirs.is_float32(layout) == (dtype == torch.float32)
    assert ours.is_finite(layout)
    tensors["b"][1] = float("nan")
    assert not ours.is_finite(layout)


def test_a_device_without_streams_of_its_own_needs_none() -> None:
    """As MPS: torch has nothing but `synchronize` for it."""
    parameters = TorchParameters({"w": torch.zeros(3, device="meta")})
    layout = FragmentLayout("f", parameters.tensors)
    buffer = parameters.buffer(layout)
    parameters.snapshot(layout, buffer)()
    parameters.synchronize()
    parameters.add(layout, buffer)()
    assert parameters.sample().device == buffer.device == torch.device("meta")


def test_bfloat16_weights_are_read_and_shifted_in_float32() -> None:
    tensor = torch.full((4,), 256.0, dtype=torch.bfloat16)
    parameters = TorchParameters({"w": tensor})
    layout = FragmentLayout("f", parameters.tensors)
    parameters.add(layout, np.array([0.5, 1.0, 3.0, -3.0], np.float32))()
    assert tensor.tolist() == [256.0, 256.0, 260.0, 253.0]


@pytest.mark.cuda
@NO_GPU
def test_streams_wait_for_each_other_and_no_thread_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The training thread has a stream of its own, which is busy when a worker reads a copy, and prepares a change."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("waits for the whole device"))

    def train() -> None:
        torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
        weights.add_(1.0)

    weights = torch.zeros(300, 70, device="cuda")
    parameters = TorchParameters({"w": weights})
    layout = FragmentLayout("f", parameters.tensors)
    ones = parameters.from_host(np.ones(layout.numel, np.float32))
    with (
        ThreadPoolExecutor(1, initializer=parameters.enter_worker) as worker,
        torch.cuda.stream(torch.cuda.Stream()),  # type: ignore[no-untyped-call]
    ):
        for round_number in range(1, 4):
            buffer = worker.submit(parameters.buffer, layout).result()
            copy = worker.submit(parameters.snapshot, layout, buffer).result()
            train()
            parameters.sample()  # as every step does
            copy()
            train()

            def read(buffer: Any = buffer) -> Any:
                parameters.synchronize()
                return parameters.to_host(buffer), parameters.add(layout, ones + buffer - buffer)

            values, add = worker.submit(read).result()
            assert set(values) == {3.0 * round_number - 2}
            add()
        assert set(weights.flatten().tolist()) == {9.0}


@pytest.mark.cuda
@NO_GPU
def test_a_worker_does_not_wait_for_what_training_has_queued() -> None:
    parameters = TorchParameters({"w": torch.zeros(300, 70, device="cuda")})
    layout = FragmentLayout("f", parameters.tensors)
    values = np.ones(layout.numel, np.float32)
    encoding = Encoding(Codec.INT4)

    def work() -> list[bytes]:
        return list(parameters.encode(parameters.from_host(values), layout, encoding))

    with ThreadPoolExecutor(1, initializer=parameters.enter_worker) as worker:
        wanted = worker.submit(work).result()
        torch.cuda._sleep(4_000_000_000)  # type: ignore[no-untyped-call]  # cycles: two seconds
        queued = torch.cuda.current_stream().record_event()
        assert worker.submit(work).result() == wanted
        assert not queued.query()
    torch.cuda.synchronize()


@pytest.mark.cuda
@NO_GPU
def test_weights_on_a_gpu_give_the_same_frames() -> None:
    tensors = {"w": torch.randn(300, 70)}
    host = TorchParameters(tensors)
    device = TorchParameters({"w": tensors["w"].cuda()})
    layout = FragmentLayout("f", host.tensors)
    encoding = Encoding(Codec.INT4)
    frames = []
    for parameters, encode in ((host, encode_frames), (device, encode_frames_torch)):
        buffer = parameters.buffer(layout)
        parameters.snapshot(layout, buffer)()
        parameters.synchronize()
        assert parameters.encode is encode
        frames.append(list(parameters.encode(buffer, layout, encoding, decoded=buffer)))
    assert frames[0] == frames[1]


class _Layers(nn.Module):
    """A model with a layer that can be replaced, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.base = nn.Linear(4, 4).requires_grad_(False)


def _layer_replaced(model: _Layers) -> None:
    model.second = nn.Linear(4, 4)


def _parameter_replaced(model: _Layers) -> None:
    model.second.weight = nn.Parameter(torch.zeros(4, 4))


_REPLACEMENTS: dict[str, tuple[Callable[[_Layers], object], str]] = {
    "a checkpoint": (lambda model: model.load_state_dict(_Layers().state_dict()), "a state dict was loaded"),
    "a layer's checkpoint": (
        lambda model: model.second.load_state_dict(nn.Linear(4, 4).state_dict()),
        "a state dict was loaded",
    ),
    "assigned": (lambda model: model.load_state_dict(_Layers().state_dict(), assign=True), "a state dict was loaded"),
    "converted": (lambda model: model.double(), "parameter=first.weight"),
    "narrowed": (lambda model: model.second.bfloat16(), "parameter=second.weight"),
    "data": (lambda model: setattr(model.second.bias, "data", torch.zeros(4)), "parameter=second.bias"),
    "a layer": (_layer_replaced, "attribute=second"),
    "a parameter": (_parameter_replaced, "attribute=weight"),
    "a new layer": (lambda model: model.add_module("third", nn.Linear(4, 4)), "attribute=third"),
    "thawed": (lambda model: model.base.bias.requires_grad_(True), "parameter=base.bias"),
}


def _train_one_step(target: str, model: _Layers, learner_id: str, replace: Callable[[_Layers], object]) -> Learner:
    """Attaches a model, replaces what it holds before its first step, and ends as `with` ends."""
    policy = Policy(inner_step_count=1, lease_term_s=1.0)
    learner = Learner(model, target=target, run="mine", learner_id=learner_id, create=True, policy=policy)

    def train() -> None:
        with learner:
            replace(model)
            learner.step(tokens=1)

    with pytest.raises(StopExchangingError, match="then attach; the run's weights win") as caught:
        train()
    assert caught.value.reason == "WEIGHTS_REPLACED"
    assert learner.failure is caught.value
    return learner


@pytest.mark.parametrize("how", _REPLACEMENTS)
def test_weights_that_were_replaced_after_attaching_are_refused_and_not_sent(target: str, how: str) -> None:
    replace, problem = _REPLACEMENTS[how]
    learner = _train_one_step(target, _Layers(), "us", replace)
    assert problem in str(learner.failure)
    assert learner.stats.deltas_acknowledged == 0


def test_replaced_weights_are_not_flushed_either(target: str) -> None:
    def trained_and_replaced(model: _Layers) -> None:
        learner.step(tokens=1)
        model.load_state_dict(_Layers().state_dict())

    model = _Layers()
    learner = Learner(model, target=target, run="mine", learner_id="us", create=True)
    with pytest.raises(StopExchangingError), learner:
        trained_and_replaced(model)
    assert learner.stats.deltas_acknowledged == 0


def test_a_tensor_or_array_that_another_one_replaces_is_noticed() -> None:
    tensors = {"w": torch.zeros(3), "b": torch.zeros(2)}
    arrays = {"w": np.zeros(3), "b": np.zeros(2)}
    of_torch, of_numpy = TorchParameters(tensors), ArrayParameters(arrays)
    tensors["w"] += 1
    arrays["w"] += 1
    assert of_torch.replaced() is of_numpy.replaced() is None
    tensors["b"] = tensors["b"] - 0.1
    arrays["b"] = arrays["b"] - 0.1
    for parameters, name in ((of_torch, "attribute=b"), (of_numpy, "array=b")):
        assert name in (parameters.replaced() or "")


def test_a_complex_parameter_is_refused_unless_it_is_frozen() -> None:
    model = nn.Linear(2, 2)
    model.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"parameter=phase, dtype=torch\.complex64"):
        TorchParameters(model)
    model.phase.requires_grad_(False)
    assert [tensor.name for tensor in TorchParameters(model).tensors] == ["weight", "bias"]


def test_a_module_that_is_attached_can_be_copied_and_pickled(tmp_path: Path) -> None:
    model = _Layers()
    parameters = TorchParameters(model)
    copied = copy.deepcopy(model)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    for other in (copied, loaded):
        other.load_state_dict(_Layers().state_dict())
    assert parameters.replaced() is None
