"""A learner's own account of itself, in two files that only grow; what is in them outlives a SIGKILL of the learner.

`NAME.jsonl`: what it sent and heard, written before it is sent and when it is heard. `NAME.work`: a record a step,
written before the step is reported to the product.
"""

from __future__ import annotations

import base64
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from skerry.errors import error_of
from skerry.v1 import exchange_pb2, types_pb2
from tests.simulation.evidence import Adopted
from tests.simulation.records import LearnerRecord

SHAPES: Final[dict[str, tuple[int, ...]]] = {"left.weight": (12, 6), "right.weight": (12, 6), "bias": (6,)}
NUMEL: Final = sum(math.prod(shape) for shape in SHAPES.values())
# Of a record: when it was written (seconds, monotonic); the time since the step before, without what its thread waited
# for a processor; its time in `step`, without the longest such wait of any thread and without what the host of a
# virtual machine took; what the step added to the weights.
_RECORD: Final = np.dtype([("at_s", "<f8"), ("cycle_s", "<f4"), ("stall_s", "<f4"), ("work", "<f4", (NUMEL,))])


class Journal:
    """Writes the account of one learner's process."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._lines = os.open(path.with_suffix(".jsonl"), flags, 0o644)
        self._work = os.open(path.with_suffix(".work"), flags, 0o644)

    def note(self, kind: str, value: Message | str | bool | list[Any]) -> None:
        """Appends what was sent or heard."""
        if isinstance(value, Message):
            value = base64.b64encode(value.SerializeToString()).decode()
        os.write(self._lines, json.dumps([kind, value]).encode() + b"\n")

    def step(self, work: NDArray[np.float32], cycle_s: float, stall_s: float) -> None:
        """Appends a step that will be reported next, with the times of the one before."""
        os.write(self._work, np.array((time.monotonic(), cycle_s, stall_s, work), _RECORD).tobytes())


class Account:
    """Reads one process's journal as it grows."""

    def __init__(self, path: Path, learner: str, incarnation: int) -> None:
        self.record = LearnerRecord(learner, incarnation, may_be_fenced=incarnation > 0)
        self.adopted: list[Adopted] = []
        self._lines = path.with_suffix(".jsonl")
        self._offset = 0
        self._work = path.with_suffix(".work")
        self._held: list[Any] = []

    def read(self, count: Callable[[], int], *, holds_fates: bool = False) -> None:
        """Reads what was written since the last call; `count` says when that was heard.

        With `holds_fates`, what was heard of deltas counts as heard at the next call.
        """
        record = self.record
        held, self._held = self._held, []
        for fate in held:
            self._take("fate", fate, count)
        if self._work.exists():
            record.step_count = self._work.stat().st_size // _RECORD.itemsize
        for kind, value in self._appended():
            if kind == "fate" and holds_fates:
                self._held.append(value)
            else:
                self._take(kind, value, count)

    def _appended(self) -> list[Any]:
        """Returns the whole lines that were appended since the last call."""
        if not self._lines.exists():
            return []
        with self._lines.open("rb") as file:
            file.seek(self._offset)
            whole = file.read().rpartition(b"\n")[0]
        self._offset += len(whole) + bool(whole)
        return [json.loads(line) for line in whole.splitlines()]

    def _take(self, kind: str, value: Any, count: Callable[[], int]) -> None:
        record = self.record
        match kind:
            case "hello":
                record.note_hello(value)
            case "header":
                record.note_header(exchange_pb2.PushHeader.FromString(base64.b64decode(value)))
            case "fate":
                record.note_fate(types_pb2.DeltaFate.FromString(base64.b64decode(value)), count)
            case "failure":
                record.failure = error_of(*value)
            case "adopted":
                self.adopted.append(Adopted(record.learner, *value))
            case "flushed":
                record.has_flushed = value
            case "left":
                record.has_left = True

    def times(self) -> tuple[NDArray[np.float64], NDArray[np.float32], NDArray[np.float32]]:
        """Returns of each step but the last: when it ended, its time, and its time in the product; each `(steps,)`."""
        records = self._records()[1:]
        return records["at_s"], records["cycle_s"], records["stall_s"]

    def load_work(self) -> None:
        """Gives the record what every step added, for the audit of contents."""
        total = np.zeros((len(records := self._records()) + 1, NUMEL))
        np.cumsum(records["work"], axis=0, dtype=np.float64, out=total[1:])
        begin = 0
        for name, shape in SHAPES.items():
            size = math.prod(shape)
            self.record.work[name] = list(total[:, begin : begin + size])
            begin += size

    def _records(self) -> NDArray[Any]:
        if not self._work.exists():
            return np.zeros(0, _RECORD)
        return np.fromfile(self._work, _RECORD, count=self.record.step_count)
