"""Tensors whose names the safetensors format keeps for itself travel like any other."""

from __future__ import annotations

import numpy as np

from skerry import ArrayLearner

NAMES = ("__metadata__", "__metadata__.tensor", "w")


def test_a_tensor_called_metadata_arrives_with_who_joins(target: str) -> None:
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(size=(2, 3)).astype(np.float32) for name in NAMES}
    joined = {name: np.zeros_like(array) for name, array in arrays.items()}
    with (
        ArrayLearner(arrays, target=target, run="odd", learner_id="a", create=True),
        ArrayLearner(joined, target=target, run="odd", learner_id="b"),
    ):
        for name, array in arrays.items():
            np.testing.assert_array_equal(joined[name], array, err_msg=name)
