"""Splits and shards: disjoint, complete, and the same for everybody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from skerry_learner.corpus import HELD_OUT_SHARE, ShardSelection, TokenSpans, load_corpus
from skerry_learner.errors import LearnerInputError

_WHOLE = ShardSelection()


def _write_documents(directory: Path, count: int) -> None:
    # Each document is full of its own number as a 16-bit token, so that a token tells where it came from.
    directory.mkdir(parents=True)
    for number in range(count):
        np.full(50, number, dtype="<u2").tofile(directory / f"{number:04}.bin")


def _sources(tokens: TokenSpans) -> list[int]:
    return [int(token) for token in tokens.slice(0, len(tokens))]


def test_training_and_held_out_tokens_share_no_document_and_miss_none(tmp_path: Path) -> None:
    _write_documents(tmp_path / "data", 200)
    corpus = load_corpus(tmp_path / "data", shard=_WHOLE)
    train, held_out = set(_sources(corpus.train)), set(_sources(corpus.held_out))
    assert train.isdisjoint(held_out)
    assert train | held_out == set(range(200))
    assert len(held_out) / 200 == pytest.approx(HELD_OUT_SHARE, abs=0.04)


def test_shards_share_no_token_and_miss_none(tmp_path: Path) -> None:
    _write_documents(tmp_path / "data", 100)
    whole = load_corpus(tmp_path / "data", shard=_WHOLE)
    parts = [load_corpus(tmp_path / "data", shard=ShardSelection(index, 3)) for index in (1, 2, 3)]
    assert [token for part in parts for token in _sources(part.train)] == _sources(whole.train)
    assert max(len(part.train) for part in parts) - min(len(part.train) for part in parts) <= 1
    for part in parts:
        assert _sources(part.held_out) == _sources(whole.held_out)


def test_the_split_depends_on_names_and_contents_alone(tmp_path: Path) -> None:
    _write_documents(tmp_path / "here", 60)
    _write_documents(tmp_path / "elsewhere" / "deeper", 60)
    first = load_corpus(tmp_path / "here", shard=ShardSelection(2, 3))
    second = load_corpus(tmp_path / "elsewhere" / "deeper", shard=ShardSelection(2, 3))
    assert _sources(first.train) == _sources(second.train)


def test_a_document_that_is_added_moves_no_other_between_the_sides(tmp_path: Path) -> None:
    _write_documents(tmp_path / "data", 80)
    before = set(_sources(load_corpus(tmp_path / "data", shard=_WHOLE).held_out))
    np.full(50, 999, dtype="<u2").tofile(tmp_path / "data" / "new.bin")
    after = set(_sources(load_corpus(tmp_path / "data", shard=_WHOLE).held_out))
    assert after - {999} == before


def test_one_text_file_is_split_at_its_end(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(200)))
    corpus = load_corpus(path, shard=_WHOLE)
    assert _sources(corpus.train) == list(range(190))
    assert _sources(corpus.held_out) == list(range(190, 200))


def test_numpy_shards_are_mapped_and_read(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(1000, dtype=np.uint16))
    corpus = load_corpus(tmp_path, shard=_WHOLE)
    assert _sources(corpus.train) + _sources(corpus.held_out) == list(range(1000))


def test_the_standard_library_is_there_without_any_download() -> None:
    corpus = load_corpus(None, shard=ShardSelection(1, 3), size_limit_bytes=500_000)
    text = bytes(_sources(corpus.train))
    assert len(corpus.train) + 2 * len(corpus.train) + len(corpus.held_out) == pytest.approx(500_000, abs=5)
    assert b"import " in text


def test_a_size_limit_keeps_a_prefix_of_the_same_order(tmp_path: Path) -> None:
    _write_documents(tmp_path / "data", 100)
    limited = load_corpus(tmp_path / "data", shard=_WHOLE, size_limit_bytes=3_030)
    whole = load_corpus(tmp_path / "data", shard=_WHOLE)
    assert len(limited.train) + len(limited.held_out) == 1515
    assert _sources(limited.train) == _sources(whole.train)[: len(limited.train)]


def test_a_slice_may_run_across_documents() -> None:
    spans = TokenSpans([np.array(part, dtype=np.uint8) for part in ([1, 2], [], [3], [4, 5, 6])])
    assert spans.slice(1, 5).tolist() == [2, 3, 4, 5]
    assert spans.between(1, 5).slice(0, 4).tolist() == [2, 3, 4, 5]
    with pytest.raises(ValueError, match="outside"):
        spans.slice(3, 7)


def test_a_missing_source_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(LearnerInputError, match=r"no such file or directory: .*nowhere.*--data"):
        load_corpus(tmp_path / "nowhere", shard=_WHOLE)


def test_an_empty_directory_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(LearnerInputError, match="no tokens to train on"):
        load_corpus(tmp_path, shard=_WHOLE)


@pytest.mark.parametrize("content", [np.zeros((3, 3), dtype=np.uint16), np.zeros(9, dtype=np.float32)])
def test_an_array_that_holds_no_tokens_is_refused(tmp_path: Path, content: NDArray[Any]) -> None:
    np.save(tmp_path / "tokens.npy", content)
    with pytest.raises(LearnerInputError, match="one-dimensional uint16"):
        load_corpus(tmp_path, shard=_WHOLE)


def test_a_damaged_array_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokens.npy").write_bytes(b"not an array")
    with pytest.raises(LearnerInputError, match="cannot read a token shard"):
        load_corpus(tmp_path, shard=_WHOLE)


@pytest.mark.parametrize("text", ["3/2", "0/2", "2", "a/b", "-1/2", "1/0", ""])
def test_a_shard_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a shard is"):
        ShardSelection.parse(text)


def test_a_shard_is_written_as_i_of_n() -> None:
    assert ShardSelection.parse("2/3") == ShardSelection(2, 3)
