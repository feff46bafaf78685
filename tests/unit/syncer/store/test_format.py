"""The golden store read as FORMAT.md says and with nothing of ours but this file: what a stranger's reader would do."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from safetensors.numpy import load

from tests.unit.syncer.store.make_golden import GOLDEN

ROOT = GOLDEN / "store"
ID = "[0-9a-f]{32}"
BLOB_NAMES = (
    rf"deltas/[a-z0-9._-]+/{ID}/\d+-\d+-[0-9a-f]{{64}}-{ID}",
    rf"updates/[a-z0-9._-]+/\d+-{ID}",
    rf"snapshots/[a-z0-9._-]+/\d+-(weights|momentum|residual)-{ID}",
)


def digest_of(data: bytes) -> str:
    return blake3(data).hexdigest()


@pytest.fixture
def run_folder() -> Path:
    name = ROOT / "runs/golden/names" / f"{1:020}"
    said = json.loads(name.read_bytes())
    assert said["format"] == 1
    return ROOT / "runs/golden" / str(said["uid"])


def entries(run_folder: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    position = 1
    while (path := run_folder / "log" / f"{position:020}").exists():
        data = path.read_bytes()
        yield data, json.loads(data)
        position += 1


def references(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if value.keys() == {"name", "first", "numel", "size_bytes", "digest"}:
            yield value
        for inner in value.values():
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def test_the_chain_of_digests_runs_from_the_spec_to_the_last_entry(run_folder: Path) -> None:
    previous = digest_of((run_folder / "run.json").read_bytes())
    positions = []
    for data, entry in entries(run_folder):
        assert entry["previous"] == previous
        assert entry["run_uid"] == run_folder.name
        assert entry["format"] == 1
        assert re.fullmatch(ID, entry["write_id"])
        previous = digest_of(data)
        positions.append(entry["position"])
    assert positions == list(range(1, len(positions) + 1))
    assert len(positions) == len(list((run_folder / "log").iterdir()))


def test_every_json_object_is_canonical(run_folder: Path) -> None:
    texts = [(run_folder / "run.json").read_bytes(), *(data for data, _ in entries(run_folder))]
    texts += [path.read_bytes().split(b"\n", 1)[0] for path in run_folder.glob("deltas/*/*/*")]
    for text in texts:
        again = json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        assert again.encode() == text


def test_every_reference_is_to_an_object_of_its_name_size_and_digest(run_folder: Path) -> None:
    condemned = {name for _, entry in entries(run_folder) for item in entry["items"] for name in item.get("names", ())}
    found = 0
    for _, entry in entries(run_folder):
        for reference in references(entry["items"]):
            name = reference["name"]
            assert any(re.fullmatch(pattern, name) for pattern in BLOB_NAMES), name
            if name in condemned:
                continue
            data = (run_folder / name).read_bytes()
            assert len(data) == reference["size_bytes"]
            if not name.startswith("deltas/"):
                assert digest_of(data) == reference["digest"]
            found += 1
    assert found > 10


def test_a_part_is_a_line_and_frames(run_folder: Path) -> None:
    for path in run_folder.glob("deltas/*/*/*"):
        line, frames = path.read_bytes().split(b"\n", 1)
        header = json.loads(line)
        first, numel, digest, _ = path.name.split("-")
        assert (header["first"], header["numel"], header["digest"]) == (int(first), int(numel), digest)
        assert (header["fragment"], header["delta"]) == (path.parent.parent.name, path.parent.name)
        assert len(header["squared_norms"]) == 4
        assert frames[:4] == b"SKF1"


def test_a_snapshot_is_plain_safetensors_in_the_order_of_the_plan(run_folder: Path) -> None:
    plan = json.loads((run_folder / "run.json").read_bytes())["fragments"][0]["tensors"]
    names = [{"__metadata__": "__metadata__.tensor"}.get(tensor["name"], tensor["name"]) for tensor in plan]
    for path in run_folder.glob("snapshots/*/*"):
        tensors = load(path.read_bytes())
        assert sorted(tensors) == sorted(names)
        for name, tensor in zip(names, plan, strict=True):
            assert list(tensors[name].shape) == tensor["shape"]
            assert tensors[name].dtype == np.float32


def test_version_0_has_the_tree_digest_of_its_snapshot(run_folder: Path) -> None:
    (item,) = [
        i for _, entry in entries(run_folder) for i in entry["items"] if i["kind"] == "snapshot" and not i["version"]
    ]
    data = (run_folder / item["weights"][0]["name"]).read_bytes()
    values = data[8 + int.from_bytes(data[:8], "little") :]
    leaf = blake3(values).digest()
    root = blake3(b"skerry.tree.v1\0" + (len(values) // 4).to_bytes(8, "little") + leaf)
    assert item["digest"] == root.hexdigest()


def test_a_checkpoint_is_the_state_after_its_entry(run_folder: Path) -> None:
    log = [(data, entry) for data, entry in entries(run_folder)]
    ((position, item),) = [
        (entry["position"], item) for _, entry in log for item in entry["items"] if item["kind"] == "checkpoint"
    ]
    assert re.fullmatch(rf"checkpoints/{item['at']:020}-{ID}", item["name"])
    assert item["at"] < position <= item["at"] + 512
    data = (run_folder / item["name"]).read_bytes()
    assert (len(data), digest_of(data)) == (item["size_bytes"], item["digest"])
    state = json.loads(data)
    assert (state["format"], state["run_uid"], state["position"]) == (1, run_folder.name, item["at"])
    assert state["head_digest"] == digest_of(log[item["at"] - 1][0])
    before = [one for _, entry in log[: item["at"]] for one in entry["items"]]
    assert [delta["item"] for delta in state["deltas"]] == [one for one in before if one["kind"] == "accepted"]
    assert state["learners"].keys() == {one["learner"] for one in before if one["kind"] == "session"}
    assert state["condemned_at"].keys() == {name for one in before for name in one.get("names", ())}
    body = state["fragments"]["body"]
    assert [version["version"] for version in body["versions"]] == list(range(body["version"] + 1))
    assert item["oldest"] == {"body": 0}
