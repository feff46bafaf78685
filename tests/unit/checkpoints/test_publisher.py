"""Version folders: what they hold, which stay, and that a process that is killed leaves none of them in part."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from skerry.checkpoints.base_model import BaseModel
from skerry.checkpoints.deltas import checksum
from skerry.checkpoints.folders import INDEX, WEIGHTS, read_metadata, version_numbers
from skerry.checkpoints.publisher import Publisher
from skerry.checkpoints.pulling import pull_weights
from skerry.follower import Version
from tests.support.killed import killed
from tests.support.versions import RUN, version_of, versions_of


def publisher(out: Path, *, keep: int = 8, dtype: str = "original", **options: Any) -> Publisher:
    return Publisher(out, **{"base": BaseModel((), ()), "like": None, **options}, keep=keep, dtype=dtype)


def pulled(out: Path, local: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of the newest version."""
    pull_weights(local, out, version_numbers(out)[-1])
    return load_file(local / WEIGHTS)


def same(tensors: dict[str, torch.Tensor], version: Version, dtype: torch.dtype = torch.bfloat16) -> bool:
    expected = {name: values.to(dtype) for name, values in version.state_dict().items()}
    return tensors.keys() == expected.keys() and all(torch.equal(tensors[name], expected[name]) for name in tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_full_version_is_an_ordinary_checkpoint(dtype: torch.dtype, tmp_path: Path) -> None:
    (tmp_path / "like").mkdir()
    for name in ("config.json", "tokenizer.model", "model.safetensors.index.json", "model.safetensors"):
        (tmp_path / "like" / name).write_text(name, encoding="utf-8")
    frozen = {"frozen": torch.arange(3), "mask": torch.tensor([True, False])}
    save_file(frozen, tmp_path / "base")
    base = BaseModel((), [tensor.name for tensor in RUN.tensors], [tmp_path / "base"])
    (version,) = versions_of(1)
    published = publisher(tmp_path / "out", base=base, like=tmp_path / "like", dtype=str(dtype)[6:]).publish(version)
    assert (published.folder.name, published.encoding) == ("weight_v000001", "full")
    assert {path.name for path in published.folder.iterdir()} == {"config.json", "tokenizer.model", INDEX, WEIGHTS}
    tensors = load_file(published.folder / WEIGHTS)
    metadata = read_metadata(published.folder)
    for name, tensor in tensors.items():
        assert metadata["checksums"][name] == checksum(tensor.contiguous().view(torch.uint8).numpy().reshape(-1))
    assert [torch.equal(tensors.pop(name), frozen[name]) for name in frozen] == [True, True]
    assert same(tensors, version, dtype)
    assert (metadata["version"], metadata["position"]) == ("000001", version.position)
    assert metadata["versions"] == {"embedding": 0, "body": 0}
    index = json.loads((published.folder / INDEX).read_text(encoding="utf-8"))
    assert index["weight_map"].keys() == metadata["checksums"].keys()


def test_a_later_version_is_the_smallest_delta_of_what_changed(tmp_path: Path) -> None:
    first, second = versions_of(2)
    weights = {layout.name: flat.copy() for layout, flat in second._pieces}
    weights["embedding"][[7, 7000, 30000]] += 1
    third = version_of(weights, (2, 0))
    out = publisher(tmp_path / "out")
    published = [out.publish(version) for version in (first, second, third)]
    assert [entry.encoding for entry in published] == ["full", "xor", "overwrite"]
    assert published[2].sizes["overwrite"] < published[2].sizes["xor"] < published[1].sizes["xor"]
    metadata = read_metadata(published[2].folder)
    assert (metadata["base_version"], metadata["delta_encoding"]) == ("000002", "overwrite")
    assert metadata["checksums"].keys() == {tensor.name for tensor in RUN.tensors}
    assert load_file(published[2].folder / WEIGHTS).keys() == {"embedding.weight"}
    assert same(pulled(tmp_path / "out", tmp_path / "local"), third)


def test_a_version_without_a_change_is_an_empty_delta(tmp_path: Path) -> None:
    (version,) = versions_of(1)
    rolled_back = version_of({layout.name: flat for layout, flat in version._pieces}, (1, 1))
    out = publisher(tmp_path / "out")
    out.publish(version)
    published = out.publish(rolled_back)
    assert published.sizes["xor"] == 0
    assert read_metadata(published.folder)["versions"] == {"embedding": 1, "body": 1}
    assert same(pulled(tmp_path / "out", tmp_path / "local"), version)


def test_the_newest_versions_stay_with_what_their_chains_begin_with(tmp_path: Path) -> None:
    out = publisher(tmp_path, keep=3)
    encodings = [out.publish(version).encoding for version in versions_of(9)]
    assert [encoding == "full" for encoding in encodings] == [number % 3 == 0 for number in range(9)]
    assert version_numbers(tmp_path) == [7, 8, 9]
    out.publish(versions_of(10)[-1])
    assert version_numbers(tmp_path) == [7, 8, 9, 10]


def test_a_new_process_goes_on_with_a_full_version(tmp_path: Path) -> None:
    versions = versions_of(3)
    first = publisher(tmp_path / "out")
    for version in versions[:2]:
        first.publish(version)
    second = publisher(tmp_path / "out")
    assert [second.publish(version).encoding for version in versions[1:]] == ["full", "xor"]
    assert second.number == 4
    assert same(pulled(tmp_path / "out", tmp_path / "local"), versions[2])


@pytest.mark.parametrize("count", range(1, 13))
def test_a_publisher_that_is_killed_leaves_whole_versions_and_goes_on(count: int, tmp_path: Path) -> None:
    versions = versions_of(4)

    def publish() -> None:
        out = publisher(tmp_path / "out", keep=2)
        for version in versions[:3]:
            out.publish(version)

    assert killed(publish, os, "fsync", count)
    for number in version_numbers(tmp_path / "out"):
        pull_weights(tmp_path / f"local{number}", tmp_path / "out", number)
    publisher(tmp_path / "out", keep=2).publish(versions[3])
    assert same(pulled(tmp_path / "out", tmp_path / "local"), versions[3])
    assert not list((tmp_path / "out").glob(".*"))
