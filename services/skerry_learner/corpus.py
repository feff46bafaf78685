"""Tokens from files, split into a training and a held-out part, and the training part into disjoint shards.

The split is a pure function of the files' names and contents, so learners with the same files agree on it. Documents
are ordered by a hash of their names, so a shard is a random sample of the whole. The hash also decides which documents
are held out, so adding files moves no other document from one part to the other.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from skerry_learner.errors import LearnerInputError

Tokens: TypeAlias = NDArray[np.uint8] | NDArray[np.uint16]

HELD_OUT_SHARE: Final = 0.05
"""The share of documents that is held out."""

_DOCUMENT_BYTES: Final = 1 << 20
"""Longer text files are cut into documents of this size, so that one large file can be split and shuffled."""

_TOKEN_DOCUMENT: Final = 1 << 22
"""The same for token shards, in tokens."""

_SKIPPED_DIRECTORIES: Final = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
"""Not in every installation of the standard library, or test code."""


@dataclass(frozen=True)
class ShardSelection:
    """Which of `count` disjoint parts of the training data a learner reads; `index` is from 1 to `count`."""

    index: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        """Check the range.

        Raises:
            ValueError: `index` is not from 1 to `count`.
        """
        if not 1 <= self.index <= self.count:
            raise ValueError(f"a shard is i/n with i from 1 to n. shard={self.index}/{self.count}")

    @classmethod
    def parse(cls, text: str) -> ShardSelection:
        """The selection that is written `i/n`, such as `2/3`.

        Raises:
            ValueError: the text has another form, or i is not from 1 to n.
        """
        found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
        if found is None:
            raise ValueError(f"a shard is written i/n, such as 2/3. shard={text[:80]!r}")
        return cls(int(found[1]), int(found[2]))


@dataclass(frozen=True)
class Corpus:
    """The tokens that one learner trains on, and the held-out tokens, which are the same for every learner."""

    train: TokenSpans
    held_out: TokenSpans
    description: str


class TokenSpans:
    """Documents in a row, as one sequence of tokens, without a copy of them."""

    def __init__(self, spans: Sequence[Tokens]) -> None:
        """Join `spans`, which may be mapped from files."""
        self._spans = [span for span in spans if span.size]
        self._ends = np.cumsum([span.size for span in self._spans], dtype=np.int64)

    def __len__(self) -> int:
        """The number of tokens."""
        return int(self._ends[-1]) if self._spans else 0

    def slice(self, start: int, stop: int) -> NDArray[np.int64]:
        """A copy of tokens `start` to `stop`, across documents; shape (stop - start,)."""
        if not 0 <= start <= stop <= len(self):
            raise ValueError(f"tokens outside the sequence. start={start}, stop={stop}, length={len(self)}")
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
        """Tokens `start` to `stop` as a sequence, without a copy."""
        spans: list[Tokens] = []
        first = 0
        for span in self._spans:
            low, high = max(start - first, 0), min(stop - first, span.size)
            if low < high:
                spans.append(span[low:high])
            first += span.size
        return TokenSpans(spans)

    def part(self, index: int, count: int) -> TokenSpans:
        """The `index`-th (from 1) of `count` contiguous, disjoint parts of equal length."""
        return self.between(len(self) * (index - 1) // count, len(self) * index // count)


def load_corpus(source: Path | None, *, shard: ShardSelection, size_limit_bytes: int | None = None) -> Corpus:
    """The corpus at `source`, or the source text of Python's standard library if `source` is None.

    A file that ends in `.bin` holds little-endian 16-bit tokens, one in `.npy` a one-dimensional array of uint8 or
    uint16; both are memory-mapped. Any other file is read into memory as bytes of text. Of a directory all token shards
    are used, or all files if it has no token shard. With `size_limit_bytes`, documents are taken in the order of their
    hashes up to that size, and the last one is cut.

    Raises:
        LearnerInputError: there is nothing to read, it cannot be read, or it is too short to split.
    """
    documents = list(_standard_library() if source is None else _documents(source))
    documents.sort(key=lambda document: _name_hash(document[0]))
    if size_limit_bytes is not None:
        documents = _limited(documents, size_limit_bytes)
    named = "Python's standard library" if source is None else str(source)
    train, held_out = _split(documents)
    if not (len(train) and len(held_out)):
        raise LearnerInputError(
            f"no tokens to train on in {named}. pass --data a file or directory with text, *.bin or *.npy"
        )
    return Corpus(train.part(shard.index, shard.count), held_out, f"{named}, shard {shard.index}/{shard.count}")


def _name_hash(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def _is_held_out(name: str) -> bool:
    # The last bytes of the hash: its first bytes decide the order, and the held-out documents must not all come first.
    return int.from_bytes(_name_hash(name)[-8:], "big") < HELD_OUT_SHARE * 2**64


def _split(documents: list[tuple[str, Tokens]]) -> tuple[TokenSpans, TokenSpans]:
    train = TokenSpans([tokens for name, tokens in documents if not _is_held_out(name)])
    held_out = TokenSpans([tokens for name, tokens in documents if _is_held_out(name)])
    if len(train) and len(held_out):
        return train, held_out
    # With few documents the hash may put all on one side; then the end of the whole is held out.
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
        raise LearnerInputError(
            f"no such file or directory: {source}. pass --data text or token shards, or leave it out"
        )
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
        raise LearnerInputError(f"cannot read data. path={path}, cause={error.strerror}") from error
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
        raise LearnerInputError(
            f"cannot read a token shard. path={path}, cause={error}. write it again as uint16"
        ) from error
    if tokens.ndim != 1 or tokens.dtype not in (np.dtype("<u2"), np.dtype("u1")):
        raise LearnerInputError(
            f"a token shard must be one-dimensional uint16 or uint8. "
            f"path={path}, dtype={tokens.dtype}, shape={tokens.shape}"
        )
    return tokens
