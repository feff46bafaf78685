"""A console of a run with 100 learners, 24 fragments and 100,000 versions, which no syncer made: a process of its own.

The console has just started and the versions are the past, or with the argument `followed` they all come while it
watches. It prints its port, then commits one more version for each line that it reads.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from google.protobuf.duration_pb2 import Duration

from skerry.v1 import types_pb2 as types
from skerry.v1.exchange_pb2 import WatchStart
from skerry.v1.runs_pb2 import GetRunResponse
from skerry.v1.types_pb2 import Event
from tests.support.console_thread import console_of

LEARNERS = [f"learner-{number:03d}" for number in range(100)]
FRAGMENTS = [f"fragment-{number:02d}" for number in range(24)]
VERSION_COUNT = 100_000
REPORT_COUNT = 1000  # of each learner
_SPAN_S = 30 * 86_400.0
_ENTRY_COUNT = 16  # of a round, whose deltas come eight in an entry


class SyntheticClient:
    """What a feed calls of a client."""

    def __init__(self, *, is_past: bool) -> None:
        self._began_s = time.time() - _SPAN_S
        self._past_count = VERSION_COUNT if is_past else 0
        self._deltas: dict[str, list[types.DeltaFate]] = {}  # the same in each round, which is quicker to make

    def get_run(self, _: str) -> GetRunResponse:
        return GetRunResponse(run=types.Run(position=1 + _ENTRY_COUNT * self._past_count))

    def list_runs(self) -> list[types.Run]:
        return []

    def close(self) -> None:
        """Nothing is open."""

    def watch(self, _: str, *, after_position: int, **_options: Any) -> Iterator[WatchStart | Event]:
        """Yields the run, its past, and then a version for each line of standard input."""
        position = 1 + _ENTRY_COUNT * self._past_count
        run = types.Run(name="large", uid="0", status=types.RUN_STATUS_OPEN, position=position)
        run.created_at.FromNanoseconds(int(1e9 * self._began_s))
        for name in FRAGMENTS:
            run.tensors.add(name=name, shape=[50_000, 10_000], dtype="float32")
            run.fragments.add(name=name, tensors=[name])
            run.versions.add(fragment=name, version=self._past_count // len(FRAGMENTS))
        yield WatchStart(run=run, learners=[self._status(name, 0) for name in LEARNERS])
        for number in range(after_position // _ENTRY_COUNT, VERSION_COUNT):
            if number % (VERSION_COUNT // REPORT_COUNT) == 0:
                yield from self._reports(number)
            yield from self._round(number, is_recent=number > VERSION_COUNT - 1000)
        yield Event(position=position)
        for number, _line in enumerate(sys.stdin, VERSION_COUNT):
            yield from self._round(number, is_recent=True)

    def _event(self, number: int, entry: int = 0, **kind: Any) -> Event:
        event = Event(position=_ENTRY_COUNT * number + 2 + entry, **kind)
        event.time.FromNanoseconds(int(1e9 * (self._began_s + _SPAN_S * number / VERSION_COUNT)))
        return event

    def _reports(self, number: int) -> Iterator[Event]:
        for name in LEARNERS:
            yield self._event(number, learner=self._status(name, number))

    def _round(self, number: int, *, is_recent: bool) -> Iterator[Event]:
        fragment, version = FRAGMENTS[number % len(FRAGMENTS)], 1 + number // len(FRAGMENTS)
        made = types.FragmentVersion(fragment=fragment, version=version)
        deltas = self._deltas.setdefault(fragment, []) or [
            types.DeltaFate(
                delta_id=f"{fragment}-{name}",
                fragment=fragment,
                learner_id=name,
                weight_share=0.01,
                step_count=24,
                token_count=24_000_000,
                size_bytes=250_000_000,
            )
            for name in LEARNERS
        ]
        self._deltas[fragment] = deltas
        if is_recent:
            for index, delta in enumerate(deltas):
                yield self._event(number, index // 8, delta_accepted=delta)
            closed = types.RoundClosed(
                fragment=fragment, version=version, delta_ids=[delta.delta_id for delta in deltas]
            )
            yield self._event(number, _ENTRY_COUNT - 2, round_closed=closed)
        committed = types.VersionCommitted(
            version=made,
            merged=deltas,
            update_size_bytes=250_000_000,
            participation=1.0,
            run_step_count=float(number),
            run_token_count=1e8 * number,
        )
        yield self._event(number, _ENTRY_COUNT - 1, version_committed=committed)

    def _status(self, name: str, number: int) -> types.LearnerStatus:
        report = types.LearnerReport(
            step_count=number,
            token_count=1_000_000 * number,
            step_time=Duration(seconds=1),
            loss=2.0 + hash((name, number)) % 1000 / 10_000,
            sent_bytes=250_000_000 * number,
            received_bytes=250_000_000 * number,
            adopted=[types.FragmentVersion(fragment=fragment, version=number // 24) for fragment in FRAGMENTS],
        )
        return types.LearnerStatus(learner_id=name, region="here", is_live=True, is_participating=True, report=report)


if __name__ == "__main__":
    with console_of(partial(SyntheticClient, is_past="followed" not in sys.argv)) as url:
        print(url, flush=True)
        while True:
            time.sleep(3600)
