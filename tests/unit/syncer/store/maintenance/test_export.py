"""An export has what a run trains, and from the files of --base what it does not; what it lacks is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from skerry import ArrayLearner, Learner
from skerry.wire.errors import TensorFileError
from skerry.wire.safetensors import read_file_header
from tests.support.adapted import BUFFERS, FROZEN, Adapted
from tests.support.syncer_thread import syncer
from tests.unit.syncer.store.maintenance.test_commands import run

Export = Callable[..., tuple[dict[str, Any], str]]


def _trained(url: str, *, dtype: torch.dtype = torch.float32) -> Adapted:
    """Returns a model that the run in the store has seen train, and nobody since."""
    model = Adapted()
    model.adapter.to(dtype)
    with syncer(store_url=url) as target, Learner(model, target=target, run="tuned", learner_id="us", create=True):
        pass
    return model


@pytest.fixture
def export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Export:
    """Exports the run to out.safetensors, and returns its JSON line and its warnings."""

    def called(*options: str) -> tuple[dict[str, Any], str]:
        capsys.readouterr()
        out = str(tmp_path / "out.safetensors")
        assert run("export", "--store", f"file://{tmp_path}/store", "tuned", "--out", out, "--json", *options) == 0
        said = capsys.readouterr()
        return json.loads(said.out), said.err

    return called


def _saved(path: Path, tensors: dict[str, torch.Tensor]) -> str:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return str(path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_export_with_its_base_is_a_whole_model(tmp_path: Path, export: Export, dtype: torch.dtype) -> None:
    model = _trained(f"file://{tmp_path}/store", dtype=dtype)
    state = model.state_dict()
    base = state | {"norm.running_mean": torch.tensor([3.0, 4.0]), "adapter.weight": torch.full((2, 3), 9.0)}
    first = _saved(tmp_path / "1.safetensors", {name: base[name] for name in list(base)[:4]})
    second = _saved(tmp_path / "2.safetensors", {name: base[name] for name in list(base)[4:]})
    said, warnings = export("--base", first, "--base", second)
    assert (said["missing"], said["other"], warnings) == ([], [], "")
    found = load_file(tmp_path / "out.safetensors")
    nn.Module.load_state_dict(Adapted(), found, strict=True)
    for name in state:
        torch.testing.assert_close(found[name], (base if name == "norm.running_mean" else state)[name], rtol=0, atol=0)


def test_an_export_without_its_base_says_what_it_lacks(tmp_path: Path, export: Export) -> None:
    _trained(f"file://{tmp_path}/store")
    said, warnings = export()
    assert set(said["missing"]) == FROZEN | BUFFERS
    assert "give the file that has them as --base. tensors=6" in warnings
    assert load_file(tmp_path / "out.safetensors").keys() == {"adapter.weight", "adapter.bias"}


def test_a_base_that_lacks_tensors_or_has_others_is_used_and_said(tmp_path: Path, export: Export) -> None:
    state = _trained(f"file://{tmp_path}/store").state_dict()
    del state["base.bias"]
    state["base.weight"] = state["base.weight"].bfloat16()
    state["packed"] = state["packed"] + 1
    state["alias.of.adapter"] = torch.zeros(2, 3)
    said, warnings = export("--base", _saved(tmp_path / "base.safetensors", state))
    assert (said["missing"], sorted(said["other"])) == (["base.bias"], ["base.weight", "packed"])
    for line in (
        "no file of --base has them. tensors=1, names=base.bias",
        "not those that the run was created with. tensors=2, names=",
        "does not know of were left out. tensors=1, names=alias.of.adapter",
    ):
        assert line in warnings
    found = load_file(tmp_path / "out.safetensors")
    assert (found["base.weight"].dtype, "alias.of.adapter" in found) == (torch.bfloat16, False)


def test_a_run_without_a_record_takes_all_of_its_base(tmp_path: Path, export: Export) -> None:
    arrays = {"adapter": torch.ones(3).numpy()}
    with syncer(store_url=f"file://{tmp_path}/store") as target:
        ArrayLearner(arrays, target=target, run="tuned", learner_id="us", create=True).close()
    base = _saved(tmp_path / "base.safetensors", {"adapter": torch.zeros(3), "base": torch.ones(2)})
    _, warnings = export("--base", base)
    assert "does not know of were taken. tensors=1, names=base" in warnings
    found = load_file(tmp_path / "out.safetensors")
    assert {name: one.tolist() for name, one in found.items()} == {"adapter": [1.0] * 3, "base": [1.0] * 2}


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
        read_file_header(path)
