"""Initial weights from a safetensors file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from skerry.cli.weights import read_weights


def test_floating_point_tensors_become_float32(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"half": np.array([[0.5, -2.0]], np.float16), "single": np.array(3.25, np.float32)}, path)
    weights = read_weights(path)
    assert {name: (array.dtype.name, array.shape) for name, array in weights.items()} == {
        "half": ("float32", (1, 2)),
        "single": ("float32", ()),
    }
    assert weights["half"].tolist() == [[0.5, -2.0]]


def test_bfloat16_is_widened_exactly(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
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
