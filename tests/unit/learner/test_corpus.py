"""Splits and shards: disjoint, complete, and the same for everybody."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from skerry_learner.corpus import HELD_OUT_SHARE, load_corpus
from skerry_learner.errors import LearnerInputError


def _write_documents(directory: Path, count: int) -> None:
    # Each document is full of its own number as a 16-bit token, so that a token tells where it came from.
    directory.mkdir(parents=True)
    for number in range(count):
        np.full(50, number, dtype="<u2").tofile(directory / f"{number:04}.bin")


def test_training_and_held_out_tokens_share_no_document_and_miss_none(tmp_path: Path) -> None:
    _write_documents(tmp_path / "data", 200)
    corpus = load_corpus(tmp_path / "data")
    train, held_out = set(corpus.train), set(corpus.held_out)
    assert train.isdisjoint(held_out)
    assert train | held_out == set(range(200))
    assert len(held_out) / 200 == pytest.approx(HELD_OUT_SHARE, abs=0.04)


def test_shards_share_no_token_and_miss_none_wherever_the_files_are(tmp_path: Path) -> None:
    for folder in ("data", "elsewhere/deeper"):
        _write_documents(tmp_path / folder, 100)
    whole = load_corpus(tmp_path / "data")
    parts = [load_corpus(tmp_path / "elsewhere" / "deeper", shard=(index, 3)) for index in (1, 2, 3)]
    assert np.array_equal(np.concatenate([part.train for part in parts]), whole.train)
    assert max(len(part.train) for part in parts) - min(len(part.train) for part in parts) <= 1
    for part in parts:
        assert np.array_equal(part.held_out, whole.held_out)


def test_a_document_that_is_added_moves_no_other_between_the_sides(tmp_path: Path) -> None:
    _write_documents(tmp_path / "data", 80)
    before = set(load_corpus(tmp_path / "data").held_out)
    np.full(50, 999, dtype="<u2").tofile(tmp_path / "data" / "new.bin")
    assert set(load_corpus(tmp_path / "data").held_out) - {999} == before


def test_one_file_of_text_or_tokens_is_split_at_its_end(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(bytes(range(200)))
    np.save(tmp_path / "tokens.npy", np.arange(200, dtype=np.uint16))
    for source in (tmp_path / "text.txt", tmp_path / "tokens.npy", tmp_path):  # of the folder only the tokens count
        corpus = load_corpus(source)
        assert corpus.train.tolist() == list(range(190))
        assert corpus.held_out.tolist() == list(range(190, 200))


def test_the_standard_library_is_there_without_any_download() -> None:
    corpus = load_corpus(None, shard=(1, 3))
    assert len(corpus.train) > 1_000_000
    assert len(corpus.held_out) < 0.2 * 3 * len(corpus.train)
    assert b"import " in corpus.train.tobytes()


def test_data_without_tokens_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(LearnerInputError, match=r"no tokens to train on in .*Pass --data"):
        load_corpus(tmp_path)
    for tokens in (np.zeros((3, 3), dtype=np.uint16), np.zeros(9, dtype=np.float32)):
        np.save(tmp_path / "tokens.npy", tokens)
        with pytest.raises(LearnerInputError, match="one-dimensional uint16"):
            load_corpus(tmp_path)
    for damage in (b"not an array", b""):
        (tmp_path / "tokens.npy").write_bytes(damage)
        with pytest.raises(LearnerInputError, match="the data can't be read"):
            load_corpus(tmp_path)
