"""Tokens from files, split into a training and a held-out part, and the training part into disjoint shards.

The split is a pure function of the files' names and contents, so learners with the same files agree on it. Documents
are ordered by a hash of their names, so a shard is a random sample of the whole. The hash also decides which documents
are held out, so adding files moves no other document from one part to the other.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from skerry_learner.errors import LearnerInputError

Tokens: TypeAlias = NDArray[np.unsignedinteger[Any]]  # (tokens,) uint8 or uint16

# The share of documents that is held out.
HELD_OUT_SHARE: Final = 0.05
# Longer files are cut into documents of this size, in tokens, so that one large file can be split and shuffled.
_TEXT_DOCUMENT: Final = 1 << 20
_TOKEN_DOCUMENT: Final = 1 << 22
# Not in every installation of the standard library, or test code.
_SKIPPED_DIRECTORIES: Final = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
_TOKEN_SUFFIXES: Final = frozenset({".bin", ".npy"})


@dataclass(frozen=True)
class Corpus:
    """The tokens that one learner trains on, and the held-out tokens, which are the same for every learner."""

    train: Tokens
    held_out: Tokens
    description: str


def load_corpus(source: Path | None, *, shard: tuple[int, int] = (1, 1)) -> Corpus:
    """Returns the corpus at `source`, or the source text of Python's standard library if `source` is None.

    A file that ends in `.bin` holds little-endian 16-bit tokens, one in `.npy` a one-dimensional array of uint8 or
    uint16; any other holds bytes of text. Of a directory all token files are used, or all files if it has none. Of
    token files only this learner's part is read into memory.

    Args:
        source: a file or a directory.
        shard: i and n, for the i-th (from 1) of n contiguous, disjoint parts of the training tokens, of equal length.

    Raises:
        LearnerInputError: there is nothing to read, it can't be read, or it is too short to split.
    """
    description = "Python's standard library" if source is None else str(source)
    documents = sorted(_documents(source), key=lambda document: _name_hash(document[0]))
    train = [tokens for name, tokens in documents if not _is_held_out(name)]
    held_out = [tokens for name, tokens in documents if _is_held_out(name)]
    if not (train and held_out):  # the hash may put a few documents all on one side: the end of the whole is held out
        whole = [tokens for _, tokens in documents]
        boundary = round(_token_count(whole) * (1 - HELD_OUT_SHARE))
        train, held_out = [_between(whole, 0, boundary)], [_between(whole, boundary, _token_count(whole))]
    if not (_token_count(train) and _token_count(held_out)):
        raise LearnerInputError(
            f"no tokens to train on in {description}. Pass --data a file or directory with text, *.bin or *.npy"
        )
    index, count = shard
    token_count = _token_count(train)
    part = _between(train, token_count * (index - 1) // count, token_count * index // count)
    return Corpus(part, np.concatenate(held_out), f"{description}, shard {index}/{count}")


def _token_count(documents: Sequence[Tokens]) -> int:
    return sum(tokens.size for tokens in documents)


def _between(documents: Sequence[Tokens], start: int, stop: int) -> Tokens:
    """Returns a copy of tokens `start` to `stop` of documents in a row."""
    pieces: list[Tokens] = [np.empty(0, np.uint8)]
    first = 0
    for tokens in documents:
        pieces.append(tokens[max(start - first, 0) : max(stop - first, 0)])
        first += tokens.size
    return np.concatenate(pieces)


def _name_hash(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def _is_held_out(name: str) -> bool:
    # The last bytes of the hash: its first bytes decide the order, and the held-out documents must not all come first.
    return int.from_bytes(_name_hash(name)[-8:], "big") < HELD_OUT_SHARE * 2**64


def _documents(source: Path | None) -> Iterator[tuple[str, Tokens]]:
    """Yields the documents of a file or directory with their names."""
    root = Path(sysconfig.get_paths()["stdlib"]) if source is None else source
    if root.is_file():
        paths, root = [root], root.parent
    elif source is None:
        paths = [path for path in _files(root, _SKIPPED_DIRECTORIES) if path.suffix == ".py"]
    else:
        files = [path for path in _files(root) if path.is_file() and not path.name.startswith(".")]
        paths = [path for path in files if path.suffix in _TOKEN_SUFFIXES] or files
    for path in paths:
        tokens = _tokens_of(path)
        numel = _TOKEN_DOCUMENT if path.suffix in _TOKEN_SUFFIXES else _TEXT_DOCUMENT
        for start in range(0, tokens.size, numel):
            yield f"{path.relative_to(root).as_posix()}#{start}", tokens[start : start + numel]


def _files(root: Path, skipped: Container[str] = ()) -> list[Path]:
    """Returns what lies below a directory, without descending into directories of the names to skip."""
    paths: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped]
        paths += [Path(folder, name) for name in names]
    return sorted(paths)


def _tokens_of(path: Path) -> Tokens:
    try:
        if path.suffix == ".npy":
            tokens: Tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        elif path.suffix == ".bin" and path.stat().st_size:
            tokens = np.memmap(path, dtype="<u2", mode="r")
        else:
            tokens = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    except (OSError, ValueError, EOFError) as error:
        raise LearnerInputError(f"the data can't be read. path={path}, because={error}") from error
    if tokens.ndim != 1 or tokens.dtype not in (np.dtype("<u2"), np.dtype("u1")):
        raise LearnerInputError(
            f"tokens must be one-dimensional uint16 or uint8. path={path}, dtype={tokens.dtype}, shape={tokens.shape}"
        )
    return tokens
