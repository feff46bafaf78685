"""Torch tensors become the very frames that NumPy arrays do, on the CPU and on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from skerry.wire import Codec, Encoding, FragmentLayout, NonFiniteError, TensorSpec
from skerry.wire.frames import encode_frames
from tests.unit.wire.wire_strategies import bits, encodings, fragments

torch = pytest.importorskip("torch", reason="torch is not installed: only learners need it")
from skerry.wire import torch_codecs  # noqa: E402 - imports torch, so it follows the check

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, NO_GPU])]
Fragment = tuple[FragmentLayout, NDArray[np.float32]]


def assert_same(values: NDArray[np.float32], layout: FragmentLayout, encoding: Encoding, device: str) -> None:
    told, device_told = np.empty_like(values), torch.empty(len(values), device=device)
    digest, device_digest = blake3(), blake3()
    expected = list(encode_frames(values, layout, encoding, decoded=told, digest=digest))
    tensor = torch.from_numpy(values).to(device)
    actual = list(torch_codecs.encode_frames_torch(tensor, layout, encoding, decoded=device_told, digest=device_digest))
    assert actual == expected
    zeros = torch.zeros_like(tensor)
    assert list(torch_codecs.encode_frames_torch(zeros, layout, encoding, base=tensor)) == expected
    assert device_digest.digest() == digest.digest()
    assert (bits(device_told.cpu().numpy()) == bits(told)).all()


@pytest.mark.parametrize("device", DEVICES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fragment=fragments(), encoding=encodings)
def test_frames_are_those_of_numpy(device: str, fragment: Fragment, encoding: Encoding) -> None:
    layout, values = fragment
    assert_same(values, layout, encoding, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("codec", [Codec.INT8, Codec.INT4])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(largest=st.integers(0x00800000, 0x7F000000))
def test_every_scale_divides_as_numpy_divides(device: str, codec: Codec, largest: int) -> None:
    """A scale or quotient off by one unit in the last place shows where quotients lie close to a tie."""
    layout = FragmentLayout("f", (TensorSpec("a", (1, 4096)),))
    top = np.array([largest], np.uint32).view(np.float32)[0]
    steps = np.linspace(-2 * codec.top_code, 2 * codec.top_code, 4096) / (2 * codec.top_code)
    assert_same((steps * np.float64(top)).astype(np.float32), layout, Encoding(codec, block=4096), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("codec", Codec)
def test_a_value_that_is_not_finite_is_refused_by_its_tensors_name(device: str, codec: Codec) -> None:
    layout = FragmentLayout("f", (TensorSpec("t0", (9, 40)), TensorSpec("t1", (3, 50))))
    for bad in (torch.nan, -torch.inf):
        values = torch.ones(layout.numel, device=device)
        values[layout.offsets[1] + 149] = bad
        with pytest.raises(NonFiniteError, match="tensor=t1, element=149"):
            list(torch_codecs.encode_frames_torch(values, layout, Encoding(codec, block=16)))


def test_a_parameter_that_requires_grad_is_encoded_and_left_alone() -> None:
    layout = FragmentLayout("f", (TensorSpec("a", (4, 32)),))
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 128))
    before = parameter.detach().clone()
    for codec in Codec:
        assert list(torch_codecs.encode_frames_torch(parameter, layout, Encoding(codec)))
    assert torch.equal(parameter.detach(), before)


def test_tensors_of_another_kind_are_refused_at_once() -> None:
    layout = FragmentLayout("f", (TensorSpec("a", (4, 32)),))
    values = torch.zeros(128)
    for wrong in (values.double(), values.reshape(4, 32)):
        with pytest.raises(ValueError, match="float32"):
            torch_codecs.encode_frames_torch(wrong, layout, Encoding(Codec.INT4))
    with pytest.raises(ValueError, match="decoded"):
        torch_codecs.encode_frames_torch(values, layout, Encoding(Codec.INT4), decoded=values[:5])


@pytest.mark.parametrize("device", DEVICES)
def test_batches_end_where_nibbles_would_pair_up_otherwise(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_codecs, "BATCH_NUMEL", 2**19)
    layout = FragmentLayout("f", (TensorSpec("a", (1, 2**20 + 3)), TensorSpec("b", (3, 2**18 + 1))))
    values = np.random.default_rng(4).standard_normal(layout.numel).astype(np.float32)
    for block in (7, 128):
        assert_same(values, layout, Encoding(Codec.INT4, block=block), device)
