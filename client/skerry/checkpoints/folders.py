"""Names and indexes of version folders, of which a reader sees each whole or not at all."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

INDEX: Final = "model.safetensors.index.json"
WEIGHTS: Final = "model-00001-of-00001.safetensors"
_NAME: Final = re.compile(r"weight_v(\d{6,})")
# Files of a Hugging Face folder that are not weights.
_COPIED_SUFFIXES: Final = frozenset({".json", ".txt", ".model", ".jinja"})


def version_folder(source: Path, number: int) -> Path:
    """Returns where a version is."""
    return source / f"weight_v{number:06d}"


def version_numbers(source: Path) -> list[int]:
    """Returns the versions that a folder has, oldest first."""
    return sorted(int(match[1]) for path in source.iterdir() if (match := _NAME.fullmatch(path.name)))


def read_metadata(folder: Path) -> dict[str, Any]:
    """Returns the metadata of a version's index.

    Raises:
        FileNotFoundError: there is no such version.
        ValueError: the index can't be read.
    """
    if not (folder / INDEX).exists():
        raise FileNotFoundError(f"no such version, or it was collected. folder={folder}")
    return dict(json.loads((folder / INDEX).read_bytes())["metadata"])


def full_before(source: Path, number: int) -> int:
    """Returns the full version with which the chain of a version begins; its own number if it is full.

    Raises:
        FileNotFoundError: a folder of the chain is not there.
        ValueError: an index can't be read.
    """
    while base := read_metadata(version_folder(source, number)).get("base_version"):
        number = int(base)
    return number


def copy_companions(like: Path, folder: Path) -> None:
    """Copies configuration and tokenizer of a model's folder.

    Raises:
        OSError: they can't be copied; shutil.SameFileError: it is the same folder.
    """
    for path in like.iterdir():
        if path.suffix in _COPIED_SUFFIXES and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)


@contextmanager
def publishing(folder: Path) -> Iterator[Path]:
    """Yields a new folder that becomes `folder` at the end of the context, durable; after an error it is gone.

    Raises:
        OSError: it can't be written, or another process writes it or has written it.
    """
    partial = _hidden(folder)
    partial.mkdir()
    try:
        yield partial
        for path in (*partial.iterdir(), partial):
            _sync(path)
        partial.rename(folder)
        _sync(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def remove(folder: Path) -> None:
    """Removes a version at once for its readers."""
    shutil.rmtree(folder.rename(_hidden(folder)))


def remove_partial(source: Path) -> None:
    """Removes what processes that were killed left behind."""
    for path in source.glob(".weight_v*"):
        shutil.rmtree(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hidden(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}")
