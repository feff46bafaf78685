"""Initial weights from a safetensors file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from skerry.cli.weights import read_weights


def test_floating_point_tensors_become_float32_exactly(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    tensors: dict[str, NDArray[Any]] = {
        "half": np.array([[0.5, -2.0]], np.float16),
        "single": np.array(3.25, np.float32),
    }
    save_file(tensors, path)
    weights = read_weights(path)
    assert {array.dtype for array in weights.values()} == {np.dtype(np.float32)}
    assert all(np.array_equal(weights[name], values) for name, values in tensors.items())
    header = json.dumps({"w": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + np.array([0x3FC0, 0xC000], "<u2").tobytes())
    assert read_weights(path)["w"].tolist() == [1.5, -2.0]


def test_what_is_not_weights_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(b"not at all")
    with pytest.raises(ValueError, match=r"weights\.safetensors"):
        read_weights(path)
    save_file({"tokens": np.array([1, 2], np.int64)}, path)
    with pytest.raises(ValueError, match="tensor=tokens"):
        read_weights(path)
