"""What an export takes from the files of --base, and what is said about them."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load, save_file

from skerry.checkpoints.base_model import BaseModel
from skerry.wire.errors import TensorFileError
from skerry.wire.untrained import UntrainedTensor, values_checksum

Save = Callable[[dict[str, torch.Tensor]], Path]
FROZEN = torch.tensor([1.0, 2.0])
PACKED = torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8)
MEAN = torch.tensor([3.0, 4.0])
RECORD = (
    UntrainedTensor("frozen", (2,), "float32", values_checksum(FROZEN.numpy().view(np.int32))),
    UntrainedTensor("packed", (2, 2), "uint8", values_checksum(PACKED.numpy())),
    UntrainedTensor("mean", (2,), "float32"),  # each learner has its own
)


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Saves tensors in a file of their own."""

    def saved(tensors: dict[str, torch.Tensor]) -> Path:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.safetensors"
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)
        return path

    return saved


def read(base: BaseModel) -> dict[str, bytes]:
    """Returns what a model's file has, which is written around a tensor that is trained."""
    file = BytesIO()
    names = base.write_model(file, {"body": ("bfloat16", (2,))}, [b"12", b"34"], {})
    tensors = {name: tensor.view(torch.uint8).numpy().tobytes() for name, tensor in load(file.getvalue()).items()}
    assert set(names) == {*base.tensors, "body"}
    assert tensors.pop("body") == b"1234"
    return tensors


def test_a_model_is_put_together_from_several_files(save: Save) -> None:
    first, second = save({"frozen": FROZEN, "trained": FROZEN}), save({"packed": PACKED, "mean": MEAN, "frozen": MEAN})
    base = BaseModel(RECORD, ["trained"], [first, second])
    assert read(base) == {"frozen": FROZEN.numpy().tobytes(), "packed": b"\1\2\3\4", "mean": MEAN.numpy().tobytes()}
    assert list(base.remarks()) == []


def test_what_is_missing_or_other_or_unknown_is_said(save: Save) -> None:
    changed = {"frozen": FROZEN.bfloat16(), "packed": PACKED + 1, "alias.of.trained": FROZEN}
    base = BaseModel(RECORD, ["trained"], [save(changed)])
    assert read(base).keys() == {"frozen", "packed"}
    lacks, others, unknown = base.remarks()
    assert lacks.endswith("no file of --base has them. tensors=1, names=mean")
    assert others.startswith("tensors of --base are not those that the run was created with. tensors=2, names=")
    assert unknown.endswith("does not know of were left out. tensors=1, names=alias.of.trained")


def test_a_run_without_a_record_takes_all_of_its_base(save: Save) -> None:
    base = BaseModel((), ["trained"], [save({"trained": MEAN, "frozen": FROZEN})])
    assert read(base) == {"frozen": FROZEN.numpy().tobytes()}
    assert [remark.partition("does not know of ")[2] for remark in base.remarks()] == [
        "were taken. tensors=1, names=frozen"
    ]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no safetensors file at all",
        (10).to_bytes(8, "little") + b'{"w": 5}  ',
        (2).to_bytes(8, "little") + b"[]",
        (63).to_bytes(8, "little") + b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}  ',
    ],
)
def test_a_base_that_is_no_whole_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "base.safetensors"
    path.write_bytes(content)
    with pytest.raises(TensorFileError, match="path="):
        BaseModel((), (), [path])
