"""Checksums of what a torch module has besides the parameters that are trained."""

from __future__ import annotations

import pytest
import torch

from skerry.model.torch import untrained
from skerry.model.torch.shards import Region
from skerry.model.torch.untrained import FrozenPart, checksum, frozen_parts, untrained_tensors


def test_a_checksum_is_the_sum_of_the_bits_times_their_places() -> None:
    """1·1·1 + 2·1·2 + 3·2·1 + 4·2·2."""
    assert int(checksum(torch.tensor([[1, 2], [3, 4]], dtype=torch.int32))) == 27


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3).T,
        torch.tensor(3.5, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.arange(4.0).to(torch.float8_e4m3fn),
        torch.complex(torch.ones(3), torch.arange(3.0)),
    ],
)
def test_a_checksum_is_of_the_values_in_their_own_type(tensor: torch.Tensor) -> None:
    other = tensor.contiguous().clone()
    other.view(-1)[-1:] = 0 if tensor.reshape(-1)[-1] else 1
    assert int(checksum(tensor.clone())) == int(checksum(tensor)) != int(checksum(other))


def test_values_in_another_order_have_another_checksum() -> None:
    assert int(checksum(torch.tensor([1.0, 2.0]))) != int(checksum(torch.tensor([2.0, 1.0])))


def test_the_checksums_of_boxes_add_up_to_that_of_the_whole() -> None:
    whole = torch.randn(5, 4, 3)
    boxes = [((0, 0, 0), whole[:2]), ((2, 0, 0), whole[2:, :3]), ((2, 3, 0), whole[2:, 3:])]
    assert sum(int(checksum(box, first)) for first, box in boxes) == int(checksum(whole))


def test_a_large_tensor_is_summed_up_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(7, 5)
    whole = int(checksum(tensor))
    monkeypatch.setattr(untrained, "_PIECE_NUMEL", 10)
    assert int(checksum(tensor)) == whole


def test_a_parameter_of_which_a_part_is_missing_has_no_checksum() -> None:
    frozen = {"w": torch.zeros(4, 2)}
    half = FrozenPart(Region((0, 0), (2, 2)), 7)
    assert [tensor.checksum for tensor in untrained_tensors(frozen, {}, {"w": [half]})] == [None]
    (whole,) = untrained_tensors(frozen, {}, {"w": [half, FrozenPart(Region((2, 0), (2, 2)), 5)]})
    assert whole.checksum == 12


def test_parameters_that_are_not_in_memory_are_not_read() -> None:
    assert frozen_parts({"w": torch.zeros(2, device="meta"), "b": torch.zeros(0)}).keys() == {"b"}
