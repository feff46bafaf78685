"""Where a fragment's tensors and blocks begin and end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.wire import FragmentLayout, TensorSpec
from skerry.wire.layout import blocks_of
from tests.unit.wire.wire_strategies import layouts


def test_offsets_follow_from_shapes_in_order() -> None:
    layout = FragmentLayout(
        "f", (TensorSpec("a", (2, 3)), TensorSpec("b", (0, 4)), TensorSpec("c", ()), TensorSpec("d", (5,)))
    )
    assert layout.offsets == (0, 6, 6, 7)
    assert layout.numel == 12
    assert list(layout.ranges(0, 12)) == [(0, 0, 6), (2, 6, 7), (3, 7, 12)]
    assert list(layout.ranges(4, 4)) == [(0, 4, 6), (2, 6, 7), (3, 7, 8)]
    assert list(layout.ranges(9, 99)) == [(3, 9, 12)]
    assert list(layout.ranges(12, 1)) == []
    assert [tensor.is_vector for tensor in layout.tensors] == [False, False, True, True]


@given(layouts, st.data())
def test_ranges_cover_each_element_once_with_its_own_tensor(layout: FragmentLayout, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, layout.numel))
    numel = data.draw(st.integers(0, layout.numel - first))
    at = first
    for index, start, stop in layout.ranges(first, numel):
        assert start == at
        assert layout.offsets[index] <= start < stop <= layout.offsets[index] + layout.tensors[index].numel
        at = stop
    assert at == first + numel


@given(layouts.filter(lambda layout: layout.numel > 0), st.integers(1, 20))
def test_blocks_restart_at_each_tensor(layout: FragmentLayout, size: int) -> None:
    blocks = blocks_of(layout, 0, layout.numel, size)
    expected = [low for _, start, stop in layout.ranges(0, layout.numel) for low in range(start, stop, size)]
    assert blocks.count == len(expected)
    assert blocks.edges.tolist() == [*expected, layout.numel]


@given(layouts, st.integers(1, 20), st.data())
def test_the_boundary_before_an_element_is_a_boundary(layout: FragmentLayout, size: int, data: st.DataObject) -> None:
    element = data.draw(st.integers(0, layout.numel))
    boundary = layout.boundary_at_or_before(element, size)
    assert element - size < boundary <= element
    assert layout.is_boundary(boundary, size)


def test_names_that_repeat_and_negative_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="repeated"):
        FragmentLayout("f", (TensorSpec("a", (1,)), TensorSpec("a", (2,))))
    with pytest.raises(ValueError, match="negative"):
        TensorSpec("a", (3, -1))


def test_a_range_that_cuts_a_block_has_no_blocks() -> None:
    layout = FragmentLayout("f", (TensorSpec("a", (1, 20)), TensorSpec("b", (1, 20))))
    assert blocks_of(layout, 16, 20, 8).count == 3
    for first, numel in ((4, 16), (0, 12), (16, 21), (-8, 16), (32, 20), (0, 0)):
        with pytest.raises(ValueError, match="range"):
            blocks_of(layout, first, numel, 8)
