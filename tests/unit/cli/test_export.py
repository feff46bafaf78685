"""`skerry export` from a syncer and from its store, and what `RunsClient` downloads for it."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch_file
from safetensors.torch import save_file

from skerry import ArrayLearner, Learner, RefusedError, RunsClient
from skerry.cli import failures
from skerry.cli.main import cli
from skerry.net.loop_thread import LoopThread
from skerry.wire.layout import FragmentLayout, TensorSpec
from tests.support.adapted import BUFFERS, FROZEN, Adapted
from tests.support.quadratic import QUICK, Quadratic, train_until
from tests.support.serve_process import ServeProcess
from tests.support.syncer_thread import syncer

MODEL_FILES = ("config.json", "tokenizer.json", "tokenizer.model")
WEIGHT_FILES = ("model.safetensors.index.json", "model-00001-of-00002.safetensors", "pytorch_model.bin")


@pytest.fixture
def store_url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


@pytest.fixture
def target(store_url: str) -> Iterator[str]:
    """Where a syncer listens that has merged some versions of the run "fit"."""
    with syncer(store_url=store_url) as address:
        problem = Quadratic()
        with ArrayLearner(
            problem.arrays, target=address, run="fit", learner_id="us", create=True, policy=QUICK
        ) as learner:
            train_until([(problem, learner)], lambda: min(learner.stats.versions.values(), default=0) > 3)
        with RunsClient(address) as client:
            client.close_run("fit")
        yield address


@pytest.fixture
def like(tmp_path: Path) -> Path:
    """A model's folder, as Hugging Face writes it."""
    folder = tmp_path / "like"
    folder.mkdir()
    for name in (*MODEL_FILES, *WEIGHT_FILES):
        (folder / name).write_text(f"[{name}]", encoding="utf-8")
    return folder


def run(*words: str | Path) -> int:
    """Runs `skerry` and returns its exit status."""
    try:
        return failures.run(cli, [str(word) for word in words])
    except SystemExit as stop:  # a command that reads the store
        return int(stop.code or 0)


def exported(out: Path, *words: str | Path) -> bytes:
    """Returns the file that `skerry export` writes."""
    assert run("export", "fit", "--out", out, *words) == 0
    return out.read_bytes()


def test_a_syncer_and_its_store_give_the_same_file(target: str, store_url: str, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    with RunsClient(target) as client:
        fragments = [fragment.name for fragment in client.get_run("fit").run.fragments]
        first = max(next(client.list_versions("fit", name, before_version=1)).position for name in fragments)
        while True:  # a closed run's log still gets its last snapshots, and the file names the position
            end = client.get_run("fit").run.position
            newest, same = exported(out, "--target", target), exported(out, "--store", store_url)
            if client.get_run("fit").run.position == end:
                break
    assert newest == same
    for position, dtype in itertools.product((first, end), ("original", "float32")):
        at = ("--position", str(position), "--dtype", dtype)
        found = exported(out, "--target", target, *at)
        assert found == exported(out, "--store", store_url, *at)
        assert (found == newest) == (position == end)
    with RunsClient(target) as client:
        pulled = dict(client.pull("fit"))
    (tmp_path / "newest").write_bytes(newest)
    file = load_file(tmp_path / "newest")
    assert pulled.keys() == file.keys()
    assert all(np.array_equal(values, file[name]) for name, values in pulled.items())
    (tmp_path / "half").write_bytes(exported(out, "--target", target, "--dtype", "bfloat16"))
    half = load_torch_file(tmp_path / "half")
    assert all(half[name].equal(torch.from_numpy(values.copy()).bfloat16()) for name, values in pulled.items())


def test_a_store_flag_counts_then_a_target_and_then_the_default_store(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("export", "fit", "--out", tmp_path / "out")
    assert run(*words) == 3, "the store in ./skerry-data, which does not exist"
    monkeypatch.setenv("SKERRY_STORE", "file:///nowhere")
    assert run(*words, "--target", target) == 0
    monkeypatch.setenv("SKERRY_TARGET", target)
    assert run(*words) == 0
    assert run(*words, "--store", "file:///nowhere") == 3


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("fit", "--position", "100000"), 3, "the run has no weights at that position. position=100000, end="),
        (("fit", "--position", "1"), 3, "`skerry log` shows the positions"),
        (("fit", "--uid", "0" * 32), 3, "another run has the name now"),
        (("fit", "--format", "hf"), 2, "--format hf takes --like FOLDER"),
    ],
)
def test_what_cannot_be_exported_is_said_with_what_to_do(
    words: tuple[str, ...], status: int, said: str, *, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("export", "--out", tmp_path / "out", "--target", target, *words) == status
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_memory_of_an_export_is_that_of_a_fragment_however_many_there_are(tmp_path: Path) -> None:
    arrays = {f"weight{nth}": np.full(2**20, nth, np.float32) for nth in range(8)}
    layouts = [FragmentLayout(name, (TensorSpec(name, values.shape),)) for name, values in arrays.items()]
    thread, server = LoopThread("syncer"), ServeProcess((tmp_path / "store").as_uri(), tmp_path)
    thread.run(server.start())
    try:
        target = f"127.0.0.1:{server.port}"
        with RunsClient(target) as client:
            client.create_run("fit", arrays, fragments=layouts)
        tracemalloc.start()
        assert run("export", "fit", "--target", target, "--out", tmp_path / "out") == 0
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        thread.run(server.stop())
        thread.close()
    assert all(np.array_equal(values, arrays[name]) for name, values in load_file(tmp_path / "out").items())
    assert peak_bytes < 3.5 * 2**22


def test_a_download_says_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skerry.runs.client._PROGRESS_S", 0.001)
    arrays = {"weight": np.zeros(2**22, np.float32)}
    seen: list[tuple[int, int]] = []
    with syncer() as target, RunsClient(target) as client:
        run_now = client.create_run("fit", arrays)
        dict(client.pull(run_now, progress=lambda done, total: seen.append((done, total))))
        run_now.versions[0].version = 7
        with pytest.raises(RefusedError, match="no such version"):
            dict(client.pull(run_now))
    assert seen == sorted(seen)
    assert {total for _, total in seen} == {2**22}
    assert any(0 < done < 2**22 for done, _ in seen)


def test_an_adapter_has_the_names_that_peft_gives_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "like").mkdir()
    (tmp_path / "like" / "adapter_config.json").write_text("{}", encoding="utf-8")
    query = "base_model.model.q_proj.lora_A{}.weight"
    head = "base_model.model{}.default.extra.weight"  # a module may be called "default" too
    frozen = {"base_model.vera_A": torch.ones(5).half(), "base_model.bits": torch.ones(3, dtype=torch.uint8)}
    like = {query.format(""): torch.zeros(2, 3), head.format(""): torch.zeros(4)}
    save_file(like | frozen, tmp_path / "like" / "adapter_model.safetensors")
    arrays = {query.format(".default"): np.ones((2, 3), np.float32), head.format(""): np.ones(4, np.float32)}
    plain = {"weight": np.ones((2, 3), np.float32)}
    words = ("--out", tmp_path / "out", "--like", tmp_path / "like", "--format", "peft")
    with syncer() as target, RunsClient(target) as client:
        for name, values in (("fit", arrays), ("plain", plain)):
            client.create_run(name, values)
        assert run("export", "fit", *words, "--target", target) == 0
        assert capsys.readouterr().err == ""
        file = load_file(tmp_path / "out" / "adapter_model.safetensors")
        assert file.keys() == like.keys() | frozen.keys()
        assert np.array_equal(file["base_model.bits"], np.ones(3, np.uint8))
        assert np.array_equal(file[query.format("")], arrays[query.format(".default")])
        assert (tmp_path / "out" / "adapter_config.json").read_text(encoding="utf-8") == "{}"
        before = (tmp_path / "out" / "adapter_model.safetensors").read_bytes()
        assert run("export", "plain", *words, "--target", target) == 2
        assert "the run is not of the adapter in --like" in capsys.readouterr().err
        assert (tmp_path / "out" / "adapter_model.safetensors").read_bytes() == before
    assert run("export", "fit", *words, "--base", tmp_path / "like" / "adapter_model.safetensors") == 2
    assert "leave out --base" in capsys.readouterr().err


def test_a_partly_frozen_model_is_whole_with_its_base(
    like: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, base = Adapted(), tmp_path / "base.safetensors"
    save_file(model.state_dict() | {"norm.running_mean": torch.tensor([3.0, 4.0])}, base)
    words = ("export", "fit", "--format", "hf", "--like", like, "--out", tmp_path / "merged", "--json")
    with syncer() as target:
        Learner(model, target=target, run="fit", learner_id="us", create=True).close()
        place = ("--target", target)
        capsys.readouterr()
        assert run(*words, *place) == 2
        assert f"give the file that has them as --base. tensors={len(FROZEN | BUFFERS)}" in capsys.readouterr().err
        assert not (tmp_path / "merged" / "model.safetensors").exists()
        assert run("export", "fit", "--json", "--out", tmp_path / "part", *place) == 0
        said = capsys.readouterr()
        assert "the export lacks tensors" in said.err
        assert set(json.loads(said.out)["missing"]) == FROZEN | BUFFERS
        assert run(*words, *place, "--base", base) == 0
        assert capsys.readouterr().err == ""
        assert run("export", "fit", "--format", "hf", "--like", like, "--out", like, *place, "--base", base) == 2
        assert "is the folder of --like" in capsys.readouterr().err
    assert {path.name for path in (tmp_path / "merged").iterdir()} == {*MODEL_FILES, "model.safetensors"}
    assert (tmp_path / "merged" / "config.json").read_text("utf-8") == "[config.json]"
    whole = load_file(tmp_path / "merged" / "model.safetensors")
    assert whole.keys() == model.state_dict().keys()
    assert whole["norm.running_mean"].tolist() == [3.0, 4.0]
