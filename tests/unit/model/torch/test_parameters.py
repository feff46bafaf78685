"""The weights of modules as flat vectors: which tensors take part, under which names, and how they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.testing._internal.two_tensor import TwoTensor

from skerry.model.interface import ArrayParameters, Parameters
from skerry.model.torch.parameters import TorchParameters
from skerry.wire import Codec, Encoding, FragmentLayout
from skerry.wire.frames import encode_frames
from skerry.wire.torch_codecs import encode_frames_torch

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def one_fragment(tensors: nn.Module | dict[str, torch.Tensor]) -> tuple[TorchParameters, FragmentLayout]:
    """Returns the parameters, and the layout of a fragment that has them all."""
    parameters = TorchParameters(tensors)
    return parameters, FragmentLayout("f", parameters.tensors)


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


def test_tied_tensors_appear_once_and_frozen_ones_not_at_all() -> None:
    names = [tensor.name for tensor in TorchParameters(StrangersModel()).tensors]
    assert names == ["tokens.weight", "mix.weight", "mix.bias", "norm.weight", "norm.bias"]


class _Pair(nn.Module):
    """Two layers, whose weights a test lays out."""

    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(0))
        self.first.data, self.second.data = first, second


_LAYOUTS: dict[str, tuple[Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]], int | None]] = {
    "one storage": (lambda buffer: (buffer, buffer), 1),
    "one view": (lambda buffer: (buffer[2:], buffer[2:]), 1),
    "halves": (lambda buffer: (buffer[:4], buffer[4:]), 2),
    "columns": (lambda buffer: (buffer[:, :3], buffer[:, 3:]), 2),
    "every second element": (lambda buffer: (buffer[:, ::2], buffer[:, 1::2]), 2),
    "halves that overlap": (lambda buffer: (buffer[:5], buffer[3:]), None),
    "a turned view": (lambda buffer: (buffer, buffer.T), None),
    "a flat view": (lambda buffer: (buffer, buffer.view(-1)), None),
}


@pytest.mark.parametrize("layout", _LAYOUTS)
@pytest.mark.parametrize("kind", ["module", "tensors", "arrays"])
def test_what_shares_memory_is_one_tensor_or_refused_by_name(kind: str, layout: str) -> None:
    lay_out, count = _LAYOUTS[layout]
    buffer = torch.zeros(8, 8)
    pair = dict(zip(("first", "second"), lay_out(buffer), strict=True))

    def made() -> Parameters:
        if kind == "arrays":
            return ArrayParameters({name: tensor.numpy() for name, tensor in pair.items()})
        return TorchParameters(_Pair(**pair) if kind == "module" else pair)

    if count is None:
        with pytest.raises(ValueError, match=r"share memory.*first=first, second=second"):
            made()
        return
    parameters = made()
    assert len(parameters.tensors) == count
    fragment = FragmentLayout("f", parameters.tensors)
    parameters.add(fragment, np.ones(fragment.numel, np.float32))()
    for tensor in pair.values():
        assert (tensor == 1).all()


def test_what_is_frozen_and_shares_memory_with_what_is_trained_is_not_compared() -> None:
    buffer = torch.zeros(8, 8)
    model = _Pair(buffer, buffer)
    model.first.requires_grad_(False)
    parameters = TorchParameters(model)
    assert [tensor.name for tensor in parameters.tensors] == ["second"]
    assert parameters.untrained() == ()


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
    with pytest.raises(ValueError, match=r"pass a mapping.*name=weight, path=module\.weight"):
        TorchParameters(wrapper)


@pytest.mark.parametrize("model", [nn.Identity(), nn.Linear(2, 2).requires_grad_(False), {}])
def test_a_model_with_nothing_to_train_is_refused_with_the_reason(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="no trainable parameter"):
        TorchParameters(model)


def test_what_is_no_tensor_is_refused_with_what_to_give_instead() -> None:
    arrays: Any = {"w": np.zeros(3)}
    with pytest.raises(TypeError, match=r"for ArrayLearner, those of JAX for JaxLearner of .*name=w, type=ndarray"):
        TorchParameters(arrays)


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
    first, second = ours.buffer(layout), theirs.buffer(layout)
    ours.snapshot(layout, first)()
    theirs.snapshot(layout, second)()
    np.testing.assert_allclose(first, second, rtol=1e-3 if dtype == torch.float16 else 1e-6)
    assert ours.is_float32(layout) == theirs.is_float32(layout) == (dtype == torch.float32)


def test_a_device_without_streams_of_its_own_needs_none() -> None:
    """As MPS: torch has nothing but `synchronize` for it."""
    parameters, layout = one_fragment({"w": torch.zeros(3, device="meta")})
    buffer = parameters.buffer(layout)
    parameters.snapshot(layout, buffer)()
    parameters.synchronize()
    parameters.add(layout, buffer)()
    assert buffer.device == torch.device("meta")


def test_bfloat16_weights_are_read_and_shifted_in_float32() -> None:
    tensor = torch.full((4,), 256.0, dtype=torch.bfloat16)
    parameters, layout = one_fragment({"w": tensor})
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
    parameters, layout = one_fragment({"w": weights})
    ones = parameters.from_host(np.ones(layout.numel, np.float32))
    with (
        ThreadPoolExecutor(1, initializer=parameters.enter_worker) as worker,
        torch.cuda.stream(torch.cuda.Stream()),  # type: ignore[no-untyped-call]
    ):
        for round_number in range(1, 4):
            buffer = worker.submit(parameters.buffer, layout).result()
            copy = worker.submit(parameters.snapshot, layout, buffer).result()
            train()
            parameters.replaced()  # as every step does
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
    parameters, layout = one_fragment({"w": torch.zeros(300, 70, device="cuda")})
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


# Parameters that are exchanged, others that would be refused, and some that can't require a gradient.
_PLAIN: dict[str, Callable[[], torch.Tensor]] = {
    "bfloat16": lambda: torch.zeros(4, 4, dtype=torch.bfloat16),
    "wrapped": lambda: TwoTensor(torch.zeros(4), torch.zeros(4)),  # type: ignore[no-untyped-call]
    "no elements": lambda: torch.zeros(0, 4),
    "scalar": lambda: torch.tensor(1.0),
    "channels last": lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(4, 6).t(),
    "part of another": lambda: torch.randn(8, 8)[::2, 1:3],
}
_ODD: dict[str, Callable[[], torch.Tensor]] = {
    "float8": lambda: torch.zeros(4, 4, dtype=torch.float8_e4m3fn),
    "complex": lambda: torch.ones(4, dtype=torch.complex64).conj(),
    "CSR": lambda: torch.eye(4).to_sparse_csr(),
    "mkldnn": lambda: torch.ones(4, 4).to_mkldnn(),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(3, 2)], layout=torch.jagged),
    "meta": lambda: torch.zeros(4, device="meta"),
    "lazy": nn.parameter.UninitializedParameter,
    "expanded": lambda: torch.zeros(1, 4).expand(4, 4),
}
_UNTRAINED: dict[str, Callable[[], torch.Tensor]] = {
    "uint8": lambda: torch.zeros(4, 4, dtype=torch.uint8),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(4, 4), 0.1, 0, torch.quint8),
}


def _with_odd(tensor: torch.Tensor, *, is_trainable: bool) -> nn.Module:
    model = nn.Linear(4, 4)
    if nn.parameter.is_lazy(tensor):
        tensor.requires_grad = is_trainable
        model.odd = tensor
    else:
        model.odd = nn.Parameter(tensor, requires_grad=is_trainable)
    return model


@pytest.mark.parametrize("make", [*_PLAIN.values(), *_ODD.values(), *_UNTRAINED.values()])
def test_a_frozen_parameter_may_be_of_any_kind(make: Callable[[], torch.Tensor]) -> None:
    parameters = TorchParameters(_with_odd(make(), is_trainable=False))
    assert [tensor.name for tensor in parameters.tensors] == ["weight", "bias"]
    assert [tensor.name for tensor in parameters.untrained()] == ["odd"]
    assert parameters.replaced() is None


@pytest.mark.parametrize("kind", _ODD)
def test_a_trainable_parameter_of_an_odd_kind_is_refused_by_name(kind: str) -> None:
    model = _with_odd(_ODD[kind](), is_trainable=True)
    with pytest.raises(ValueError, match=r"\Aparameter.*\bodd\b|\Aa parameter can't be exchanged: .*=odd") as caught:
        TorchParameters(model).check_in_memory()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", _PLAIN)
def test_a_trainable_parameter_may_lie_in_memory_as_it_likes(kind: str) -> None:
    parameters, layout = one_fragment(_with_odd(_PLAIN[kind](), is_trainable=True))
    parameters.load(layout, np.ones(layout.numel, np.float32))()
    parameters.add(layout, np.ones(layout.numel, np.float32))()
    copied = parameters.buffer(layout)
    parameters.snapshot(layout, copied)()
    assert (copied == 2.0).all() or kind == "wrapped"  # which holds the weights twice, and shows their sum
    assert parameters.replaced() is None


def test_a_mapping_is_checked_as_a_module_is() -> None:
    for make in (_ODD["complex"], _ODD["CSR"]):
        with pytest.raises(ValueError, match="parameter=odd"):
            TorchParameters({"w": torch.zeros(2), "odd": make()})
