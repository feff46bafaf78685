"""Where tokens come from: files split into a training and a held-out part, and the training part into disjoint shards.

Everything here is a pure function of the files' names and contents, so that learners that hold the same files agree on
the split without a word between them. Documents are put in the order of a hash of their names: a shard is then a fair
sample of the whole, whatever the directory looks like. A document is held out by the same hash, so that files added
later never move another from one side to the other.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from skerry.learner.errors import DataError

Tokens: TypeAlias = NDArray[np.uint8] | NDArray[np.uint16]

HELD_OUT_SHARE: Final = 0.05
"""The share of documents that no learner trains on."""

_DOCUMENT_BYTES: Final = 1 << 20
"""Longer text files are cut into documents of this size, so that one big file can be split and shuffled too."""

_TOKEN_DOCUMENT: Final = 1 << 22
"""The same for token shards, in tokens."""

_SKIPPED_DIRECTORIES: Final = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
"""Not part of every installation's standard library, or not Python that a person wrote to be read."""


@dataclass(frozen=True)
class ShardSelection:
    """Which of `count` disjoint parts of the training data a learner reads: `index` from 1 to `count`."""

    index: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        """Refuse a part that doesn't exist.

        Raises:
            ValueError: `index` isn't within 1 to `count`.
        """
        if not 1 <= self.index <= self.count:
            message = f"a shard is i/n with i from 1 to n. shard={self.index}/{self.count}"
            raise ValueError(message)

    @classmethod
    def parse(cls, text: str) -> ShardSelection:
        """The selection written as `i/n`, such as `2/3`.

        Raises:
            ValueError: it isn't written so.
        """
        index, slash, count = text.partition("/")
        if not (slash and index.isdecimal() and count.isdecimal()):
            message = f"a shard is written i/n, such as 2/3. shard={text!r}"
            raise ValueError(message)
        return cls(int(index), int(count))


@dataclass(frozen=True)
class Corpus:
    """The tokens that one learner trains on, and those on which every learner is judged."""

    train: TokenSpans
    held_out: TokenSpans
    description: str


class TokenSpans:
    """Documents one after another, seen as one long sequence of tokens that is never copied whole."""

    def __init__(self, spans: Sequence[Tokens]) -> None:
        """Join `spans`, which stay where they are: in memory, or mapped from a file."""
        self._spans = [span for span in spans if span.size]
        self._ends = np.cumsum([span.size for span in self._spans], dtype=np.int64)

    def __len__(self) -> int:
        """Tokens in all."""
        return int(self._ends[-1]) if self._spans else 0

    def slice(self, start: int, stop: int) -> NDArray[np.int64]:
        """A copy of tokens `start` to `stop`, which may run across documents; shape (stop - start,)."""
        if not 0 <= start <= stop <= len(self):
            message = f"tokens outside the sequence. start={start}, stop={stop}, length={len(self)}"
            raise ValueError(message)
        pieces: list[NDArray[np.int64]] = []
        number = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            end = int(self._ends[number])
            offset = start - (end - self._spans[number].size)
            piece = self._spans[number][offset : offset + min(stop, end) - start]
            pieces.append(piece.astype(np.int64))
            start += piece.size
            number += 1
        return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)

    def between(self, start: int, stop: int) -> TokenSpans:
        """Tokens `start` to `stop` as a sequence of their own that copies nothing."""
        spans: list[Tokens] = []
        first = 0
        for span in self._spans:
            low, high = max(start - first, 0), min(stop - first, span.size)
            if low < high:
                spans.append(span[low:high])
            first += span.size
        return TokenSpans(spans)

    def part(self, index: int, count: int) -> TokenSpans:
        """The `index`-th (from 1) of `count` contiguous parts of equal length; parts share no token."""
        return self.between(len(self) * (index - 1) // count, len(self) * index // count)


def load_corpus(source: Path | None, *, shard: ShardSelection, size_limit_bytes: int | None = None) -> Corpus:
    """The corpus at `source`, or the source text of this Python's standard library where `source` is None.

    A file that ends in `.bin` holds little-endian 16-bit tokens, one in `.npy` a one-dimensional array of uint8 or
    uint16; both are mapped, not read. Any other file is text, read into memory as bytes. A directory is searched for
    token shards, or, where it has none, for text files. With `size_limit_bytes`, documents are taken in the order of
    their hashes until their size is reached, the last one cut.

    Raises:
        DataError: there is nothing to read, it can't be read, or it is too short to split.
    """
    documents = list(_standard_library() if source is None else _documents(source))
    documents.sort(key=lambda document: _name_hash(document[0]))
    if size_limit_bytes is not None:
        documents = _limited(documents, size_limit_bytes)
    named = "Python's standard library" if source is None else str(source)
    train, held_out = _split(documents)
    if not (len(train) and len(held_out)):
        message = f"no tokens to train on in {named}: name a file or directory with text, *.bin or *.npy by --data"
        raise DataError(message)
    return Corpus(train.part(shard.index, shard.count), held_out, f"{named}, shard {shard.index}/{shard.count}")


def _name_hash(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def _is_held_out(name: str) -> bool:
    # Other bytes of the hash than the order starts with, else the held-out documents would all come first.
    return int.from_bytes(_name_hash(name)[-8:], "big") < HELD_OUT_SHARE * 2**64


def _split(documents: list[tuple[str, Tokens]]) -> tuple[TokenSpans, TokenSpans]:
    train = TokenSpans([tokens for name, tokens in documents if not _is_held_out(name)])
    held_out = TokenSpans([tokens for name, tokens in documents if _is_held_out(name)])
    if len(train) and len(held_out):
        return train, held_out
    # Too few documents for the hash to leave some on both sides: the end of the whole is held out instead.
    whole = TokenSpans([tokens for _, tokens in documents])
    boundary = round(len(whole) * (1 - HELD_OUT_SHARE))
    return whole.between(0, boundary), whole.between(boundary, len(whole))


def _limited(documents: list[tuple[str, Tokens]], size_limit_bytes: int) -> list[tuple[str, Tokens]]:
    kept: list[tuple[str, Tokens]] = []
    left = size_limit_bytes
    for name, tokens in documents:
        taken = tokens[: left // tokens.itemsize]
        if taken.size == 0:
            break
        kept.append((name, taken))
        left -= taken.nbytes
    return kept


def _standard_library() -> Iterator[tuple[str, Tokens]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not _SKIPPED_DIRECTORIES.intersection(relative.parts):
            yield from _text_documents(path, relative.as_posix())


def _documents(source: Path) -> Iterator[tuple[str, Tokens]]:
    if source.is_file():
        yield from _file_documents(source, source.name)
        return
    if not source.is_dir():
        message = f"no such file or directory: {source}. name text or token shards by --data, or leave it out"
        raise DataError(message)
    paths = sorted(path for path in source.rglob("*") if path.is_file() and not path.name.startswith("."))
    shards = [path for path in paths if path.suffix in {".bin", ".npy"}]
    for path in shards or paths:
        yield from _file_documents(path, path.relative_to(source).as_posix())


def _file_documents(path: Path, name: str) -> Iterator[tuple[str, Tokens]]:
    if path.suffix not in {".bin", ".npy"}:
        yield from _text_documents(path, name)
        return
    tokens = _mapped_tokens(path)
    for start in range(0, tokens.size, _TOKEN_DOCUMENT):
        yield f"{name}#{start}", tokens[start : start + _TOKEN_DOCUMENT]


def _text_documents(path: Path, name: str) -> Iterator[tuple[str, Tokens]]:
    try:
        content = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    except OSError as error:
        message = f"cannot read {path}: {error.strerror}"
        raise DataError(message) from error
    for start in range(0, content.size, _DOCUMENT_BYTES):
        yield f"{name}#{start}", content[start : start + _DOCUMENT_BYTES]


def _mapped_tokens(path: Path) -> Tokens:
    try:
        if path.stat().st_size == 0:
            return np.empty(0, dtype=np.uint16)
        if path.suffix == ".bin":
            return np.memmap(path, dtype="<u2", mode="r")
        tokens: Tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        message = f"cannot read the token shard {path}: {error}. make it anew as uint16"
        raise DataError(message) from error
    if tokens.ndim != 1 or tokens.dtype not in (np.dtype("<u2"), np.dtype("u1")):
        message = (
            f"{path} holds {tokens.dtype} of shape {tokens.shape}: a token shard is one-dimensional uint16 or uint8"
        )
        raise DataError(message)
    return tokens
