"""The fragment plan of a new run: which tensors synchronise together, balanced so that traffic is even."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from skerry.errors import error_of
from skerry.wire.layout import FragmentLayout, TensorSpec
from skerry.wire.policy import MergeRule, Policy

EMBEDDING: Final = "embedding"
MIN_FRAGMENTS: Final = 4
# As published (P = 24): one fragment moves a step at H = 24.
MAX_FRAGMENTS: Final = 24
# Elements for each fragment by default: one costs syncer and learners some 10 ms, whatever its size.
_WORTH_NUMEL: Final = 8_000_000
_EMBEDDING_NAME: Final = re.compile(r"embed|(^|[._])(wte|wpe|emb|tok_emb|pos_emb)([._]|$)", re.IGNORECASE)


@dataclass(frozen=True)
class FragmentPlan:
    """A partition of the model's tensors, and the merge rules of fragments that do not take the policy's."""

    fragments: tuple[FragmentLayout, ...]
    merge_by_fragment: Mapping[str, MergeRule] = field(default_factory=dict)

    def policy(self, policy: Policy) -> Policy:
        """Returns the policy with the plan's merge rules, where it has none of its own for the fragment."""
        return replace(policy, merge_by_fragment={**self.merge_by_fragment, **policy.merge_by_fragment})


def plan_fragments(tensors: Iterable[TensorSpec], *, fragment_count: int | None = None) -> FragmentPlan:
    """Returns a plan of at most `fragment_count` fragments (by default one for 8 million elements, 4 to 24 of them).

    Embedding tables, which are known by their names, form a fragment of their own, which is merged by plain mean. The
    other tensors go, largest first, into the fragment with the fewest elements, so that the largest fragment is at most
    4/3 of the best possible. Within a fragment matrices come before vectors, each in the model's order. The same
    tensors give the same plan everywhere.

    Raises:
        ValueError: no tensors, or `fragment_count` below 1.

    Source: Decoupled DiLoCo (arXiv 2604.21428): balanced greedy packing, the embedding apart and merged by mean.
    """
    named = tuple(tensors)
    if not named or sum(tensor.numel for tensor in named) == 0:
        raise ValueError("a model needs at least one tensor with elements")
    if fragment_count is not None and fragment_count < 1:
        raise ValueError(f"fragment_count must be at least 1. fragment_count={fragment_count}")
    count = fragment_count or usual_fragment_count(sum(tensor.numel for tensor in named))
    matrices = [tensor for tensor in named if len(tensor.shape) == 2]
    tables = [tensor for tensor in matrices if count > 1 and _EMBEDDING_NAME.search(tensor.name)]
    others = [tensor for tensor in named if tensor not in tables]
    if not others or not tables:
        return FragmentPlan(_packed(named, count))
    embedding = FragmentLayout(EMBEDDING, _ordered(tables, named))
    return FragmentPlan((embedding, *_packed(others, count - 1)), {EMBEDDING: MergeRule.MEAN})


def usual_fragment_count(numel: int) -> int:
    """Returns the most fragments that a model of so many elements is divided into by default."""
    return min(MAX_FRAGMENTS, max(MIN_FRAGMENTS, round(numel / _WORTH_NUMEL)))


def check_same_tensors(own: Iterable[TensorSpec], fragments: Iterable[FragmentLayout]) -> None:
    """Checks that a model has exactly the tensors of a run.

    Raises:
        RefusedError: SHAPE_MISMATCH; the message names the first tensors that differ.
    """
    here = {tensor.name: tensor.shape for tensor in own}
    there = {tensor.name: tensor.shape for layout in fragments for tensor in layout.tensors}
    if here == there:
        return
    missing, unknown = sorted(there.keys() - here.keys()), sorted(here.keys() - there.keys())
    shapes = [
        f"{name}: model {here[name]}, run {there[name]}"
        for name in sorted(here.keys() & there.keys())
        if here[name] != there[name]
    ]
    raise error_of(
        "SHAPE_MISMATCH",
        "the model's tensors are not the run's. "
        f"only_in_run={missing[:3]}, only_in_model={unknown[:3]}, shapes={shapes[:3]}, "
        f"differences={len(missing) + len(unknown) + len(shapes)}",
    )


def _packed(tensors: Sequence[TensorSpec], count: int) -> tuple[FragmentLayout, ...]:
    bins: list[list[TensorSpec]] = [[] for _ in range(min(count, len(tensors)))]
    loads = [0] * len(bins)
    for tensor in sorted(tensors, key=lambda tensor: (-tensor.numel, tensor.name)):
        lightest = loads.index(min(loads))
        bins[lightest].append(tensor)
        loads[lightest] += tensor.numel
    return tuple(
        FragmentLayout(f"fragment-{number:02}", _ordered(members, tensors)) for number, members in enumerate(bins)
    )


def _ordered(members: Iterable[TensorSpec], tensors: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    place = {tensor.name: index for index, tensor in enumerate(tensors)}
    return tuple(sorted(members, key=lambda tensor: (tensor.is_vector, place[tensor.name])))
