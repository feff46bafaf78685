"""Versions of a small run, as a follower yields them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from skerry.follower import Version
from skerry.v1 import types_pb2 as v1
from skerry.wire.layout import FragmentLayout, TensorSpec

LAYOUTS = (
    FragmentLayout("embedding", (TensorSpec("embedding.weight", (5000, 8)),)),
    FragmentLayout("body", (TensorSpec("body.weight", (20, 10)), TensorSpec("body.bias", (10,)))),
)
RUN = v1.Run(
    name="demo",
    uid="0" * 32,
    tensors=[v1.Tensor(name=t.name, shape=t.shape, dtype="bfloat16") for layout in LAYOUTS for t in layout.tensors],
    fragments=[v1.Fragment(name=layout.name, tensors=[t.name for t in layout.tensors]) for layout in LAYOUTS],
)


def version_of(weights: Mapping[str, NDArray[np.float32]], versions: tuple[int, int]) -> Version:
    """Returns a version with the weights of each fragment."""
    pieces = tuple((layout, weights[layout.name]) for layout in LAYOUTS)

    def report(position: int, metrics: Mapping[str, float]) -> v1.MetricsReport:
        return v1.MetricsReport(position=position, metrics=metrics)

    return Version(RUN, 10 * sum(versions) + 1, dict(zip(weights, versions, strict=True)), pieces, report)


def versions_of(count: int, *, scale: float = 0.01) -> list[Version]:
    """Returns versions of a training that changes the embedding once and then the body each time by about `scale`."""
    numbers = np.random.default_rng(0)
    weights = {layout.name: numbers.normal(size=layout.numel).astype(np.float32) for layout in LAYOUTS}
    made = [version_of(weights, (0, 0))]
    for number in range(1, count):
        name = LAYOUTS[min(number - 1, 1)].name
        change = scale * numbers.normal(size=len(weights[name]))
        weights = weights | {name: (weights[name] - change).astype(np.float32)}
        made.append(version_of(weights, (1, number - 1)))
    return made
