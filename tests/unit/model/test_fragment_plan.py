"""Fragment plans: a partition, balanced, the same everywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry import RefusedError, plan_fragments
from skerry.model.fragment_plan import EMBEDDING, check_same_tensors
from skerry.wire import FragmentLayout, TensorSpec
from skerry.wire.policy import MergeRule

shapes = st.one_of(st.tuples(st.integers(1, 50)), st.tuples(st.integers(1, 50), st.integers(1, 50)))
tensor_lists = st.lists(shapes, min_size=1, max_size=40).map(
    lambda found: [TensorSpec(f"layer.{index}.weight", shape) for index, shape in enumerate(found)]
)


@given(tensor_lists, st.integers(1, 30))
def test_every_tensor_is_in_exactly_one_fragment(tensors: list[TensorSpec], count: int) -> None:
    plan = plan_fragments(tensors, fragment_count=count)
    placed = [tensor for layout in plan.fragments for tensor in layout.tensors]
    assert sorted(placed, key=str) == sorted(tensors, key=str)
    assert len(plan.fragments) <= count
    assert all(layout.tensors for layout in plan.fragments)


@given(tensor_lists, st.integers(1, 30))
def test_no_fragment_exceeds_the_mean_by_more_than_a_tensor(tensors: list[TensorSpec], count: int) -> None:
    layouts = [layout for layout in plan_fragments(tensors, fragment_count=count).fragments if layout.name != EMBEDDING]
    sizes = [tensor.numel for layout in layouts for tensor in layout.tensors]
    for layout in layouts:
        smallest = min(tensor.numel for tensor in layout.tensors)
        assert layout.numel <= sum(sizes) / len(layouts) + smallest


def test_packing_goes_largest_first_into_the_least_loaded() -> None:
    tensors = [TensorSpec(name, (size,)) for name, size in (("a", 3), ("b", 3), ("c", 2), ("d", 2), ("e", 2))]
    plan = plan_fragments(tensors, fragment_count=2)
    assert [[tensor.name for tensor in layout.tensors] for layout in plan.fragments] == [["a", "c", "e"], ["b", "d"]]


@given(tensor_lists, st.randoms(use_true_random=False))
def test_the_members_of_fragments_do_not_depend_on_order(tensors: list[TensorSpec], shuffle: object) -> None:
    mixed = list(tensors)
    shuffle.shuffle(mixed)  # type: ignore[attr-defined]  # hypothesis gives a random.Random

    def members(given: list[TensorSpec]) -> list[set[str]]:
        return [{tensor.name for tensor in layout.tensors} for layout in plan_fragments(given).fragments]

    assert sorted(map(sorted, members(mixed))) == sorted(map(sorted, members(tensors)))


@given(tensor_lists)
def test_matrices_come_before_vectors(tensors: list[TensorSpec]) -> None:
    for layout in plan_fragments(tensors).fragments:
        kinds = [tensor.is_vector for tensor in layout.tensors]
        assert kinds == sorted(kinds)


def test_the_embedding_is_apart_and_merged_by_mean() -> None:
    tensors = [TensorSpec("model.embed_tokens.weight", (512, 16)), TensorSpec("a.weight", (16, 16))]
    plan = plan_fragments(tensors)
    assert plan.fragments[0] == FragmentLayout(EMBEDDING, (tensors[0],))
    assert plan.merge_by_fragment == {EMBEDDING: MergeRule.MEAN}


def test_larger_models_have_more_fragments_up_to_twenty_four() -> None:
    def count(numel: int) -> int:
        return len(plan_fragments([TensorSpec(f"{i}.w", (numel // 100,)) for i in range(100)]).fragments)

    assert [count(numel) for numel in (10**5, 10**6, 10**7, 10**8, 10**9, 10**11)] == [4, 4, 4, 12, 24, 24]


def test_a_model_without_tensors_has_no_plan() -> None:
    with pytest.raises(ValueError, match="at least one"):
        plan_fragments([])


def test_differing_tensors_are_named() -> None:
    layout = FragmentLayout("f", (TensorSpec("a", (2,)), TensorSpec("b", (3,))))
    check_same_tensors([TensorSpec("b", (3,)), TensorSpec("a", (2,))], [layout])
    with pytest.raises(RefusedError, match=r"only_in_run=\['b'\].*only_in_model=\['c'\].*a: model \(4,\), run \(2,\)"):
        check_same_tensors([TensorSpec("a", (4,)), TensorSpec("c", (1,))], [layout])
