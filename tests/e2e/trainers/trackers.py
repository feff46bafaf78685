"""What Weights & Biases and trackio wrote to a folder, without a network: one dictionary a row of their logs."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import wandb
from wandb.proto.wandb_internal_pb2 import Record

# A file of Weights & Biases is a log as LevelDB has it: blocks of 32 KiB, with records cut at their ends.
_BLOCK: Final = 2**15
_FILE_HEADER: Final = 7
_PIECE_HEADER: Final = struct.Struct("<4xHB")
_WHOLE, _FIRST, _LAST = 1, 2, 4


def wandb_rows(folder: Path) -> list[dict[str, Any]]:
    """Returns what the one run in `folder` has logged by name, without the names that are the tracker's own.

    Ends the run and the process that writes its file, which is complete only then.
    """
    wandb.finish()
    wandb.teardown()
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    rows = [Record.FromString(one).history for one in _records(path.read_bytes())]
    items = [{one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in row.item} for row in rows]
    return [{name: value for name, value in row.items() if not name.startswith("_")} for row in items if row]


def trackio_rows(project: str) -> list[dict[str, Any]]:
    """Returns what the one run of the project has logged by name, without the time."""
    from trackio.sqlite_storage import SQLiteStorage  # reads where its files are when it is imported

    (run,) = SQLiteStorage.get_runs(project)
    rows = SQLiteStorage.get_logs(project, run)
    return [{name: value for name, value in row.items() if name not in {"timestamp", "step"}} for row in rows]


def _records(log: bytes) -> Iterator[bytes]:
    place, record = _FILE_HEADER, b""
    while place + _PIECE_HEADER.size <= len(log):
        if (left := _BLOCK - place % _BLOCK) < _PIECE_HEADER.size:
            place += left
            continue
        size, kind = _PIECE_HEADER.unpack_from(log, place)
        place += _PIECE_HEADER.size + size
        piece = log[place - size : place]
        record = piece if kind in {_WHOLE, _FIRST} else record + piece
        if kind in {_WHOLE, _LAST}:
            yield record
