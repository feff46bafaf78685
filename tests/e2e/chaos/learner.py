"""A learner of the campaign: `python -m tests.e2e.chaos.learner SETTINGS`, an `ArrayLearner`.

It keeps the journal of what it trained, sent and heard. SIGTERM has it send what is unsent and leave.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from skerry import ArrayLearner, Policy, SkerryError, array_learner
from skerry.errors import RunClosedError
from skerry.net.grpc_transport import GrpcTransport
from skerry.net.transport import A, Method
from skerry.runtime.clock import SystemClock
from skerry.v1 import exchange_pb2
from skerry.wire.digests import tree_digest
from tests.e2e.chaos.journal import NUMEL, SHAPES, Journal
from tests.simulation.learner_process import RUN
from tests.simulation.records import fates_in_answer, fates_in_news

# Nothing is collected: the auditor reads every delta of the run when it is over.
POLICY: Final = Policy(inner_step_count=20, lease_term_s=4.0, quorum_count=2, kept_version_count=1_000_000)
Weights = NDArray[np.float32]
R = TypeVar("R", exchange_pb2.PushDeltaResponse, exchange_pb2.QueryPushResponse)
_STEP_SIZE: Final = 0.1
_TOKENS: Final = 32
_ENDS: Final = np.cumsum([math.prod(shape) for shape in SHAPES.values()])[:-1]
_FLUSH_S: Final = 30.0
_REJOIN_S: Final = 1.0


class RecordingTransport(GrpcTransport):
    """The product's transport, which notes what goes out before it does, and what came in."""

    def __init__(self, target: str, *, journal: Journal, **options: Any) -> None:
        super().__init__(target, **options)
        self._journal = journal

    async def attach(
        self, requests: AsyncIterator[exchange_pb2.AttachRequest]
    ) -> AsyncGenerator[exchange_pb2.AttachResponse, None]:
        """Opens the attach stream."""
        responses = super().attach(self._noting(requests))
        try:
            async for response in responses:
                for fate in fates_in_news(response):
                    self._journal.note("fate", fate)
                yield response
        finally:
            await responses.aclose()

    async def push_delta(
        self, requests: AsyncIterator[exchange_pb2.PushDeltaRequest]
    ) -> exchange_pb2.PushDeltaResponse:
        """Sends a push."""
        return self._heard(await super().push_delta(self._noting(requests)))

    async def ask(self, method: Method[A], request: object, **rules: Any) -> A:
        """Makes a unary call."""
        answer = await super().ask(method, request, **rules)
        if isinstance(answer, exchange_pb2.QueryPushResponse):
            self._heard(answer)
        return answer

    def _heard(self, response: R) -> R:
        for fate in fates_in_answer(response):
            self._journal.note("fate", fate)
        return response

    async def _noting(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for request in requests:
            kind = request.WhichOneof("kind")
            if kind == "hello":
                self._journal.note("hello", request.hello.session_id)
            elif kind == "header":
                self._journal.note("header", request.header)
            yield request


def main(text: str) -> None:
    """Trains until it is told to end, or is stopped by the run."""
    settings = json.loads(text)
    journal = Journal(Path(settings["journal"]))
    is_ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: is_ending.set())
    patch.object(array_learner, "GrpcTransport", partial(RecordingTransport, journal=journal)).start()
    weights = np.zeros(NUMEL, np.float32)
    learner = _joined(settings, weights, journal, is_ending)
    if learner is None:
        return
    _train(learner, settings, weights, journal, is_ending)
    if learner.failure is None:
        journal.note(
            "flushed", learner.flush(_FLUSH_S, is_last=True) and learner.failure is None and not learner.is_closed
        )
        backend = learner._backend
        assert isinstance(backend, array_learner.SingleProcess)
        for name, fragment in backend._exchange._fragments.items():
            ledger = fragment.ledger
            journal.note("adopted", [name, ledger.version, tree_digest(ledger.anchor).hex()])
    if learner.failure is not None:
        journal.note("failure", [learner.failure.reason, str(learner.failure)])
    learner.close()
    journal.note("left", True)


def _joined(
    settings: dict[str, Any], weights: Weights, journal: Journal, is_ending: threading.Event
) -> ArrayLearner | None:
    """Returns a learner that has joined, however long that takes; None where the run is closed or it has to end."""
    while not is_ending.is_set():
        try:
            parts = zip(SHAPES.items(), np.split(weights, _ENDS), strict=True)
            return ArrayLearner(
                {name: part.reshape(shape) for (name, shape), part in parts},
                target=settings["target"],
                run=RUN,
                learner_id=settings["name"],
                region=settings["name"],
                create=True,
                policy=POLICY,
                fragment_count=2,
            )
        except RunClosedError as error:
            journal.note("failure", [error.reason, str(error)])
            return None
        except SkerryError as error:
            print(f"could not join: {error}", flush=True)
            is_ending.wait(_REJOIN_S)
    journal.note("left", True)
    return None


def _train(
    learner: ArrayLearner, settings: dict[str, Any], weights: Weights, journal: Journal, is_ending: threading.Event
) -> None:
    source, pauses = np.random.default_rng(settings["seed"]), random.Random(settings["seed"])
    clock = SystemClock()
    cycle_s = stall_s = 0.0
    while not is_ending.is_set() and learner.failure is None:
        began_s, queued_s = clock.monotonic_s(), _queued_s()
        time.sleep(settings["step_s"] * pauses.uniform(0.9, 1.1))
        work = (source.standard_normal(NUMEL) * _STEP_SIZE).astype(np.float32)
        weights += work
        journal.step(work, cycle_s, stall_s)
        waits_s, stolen_s, step_s = _waits_s(), _stolen_s(), clock.monotonic_s()
        learner.step(_TOKENS, 1.0)
        now_s = clock.monotonic_s()  # before the counters are read, which takes as long as any step on a loaded machine
        # Whoever holds the interpreter's lock and waits for a processor holds this thread up as well.
        longest_s = max((waited - waits_s.get(thread, waited) for thread, waited in _waits_s().items()), default=0.0)
        most_stolen_s = max(after - before for before, after in zip(stolen_s, _stolen_s(), strict=False))
        stall_s = max(now_s - step_s - max(longest_s, most_stolen_s), 0.0)
        cycle_s = now_s - began_s - (_queued_s() - queued_s)


def _queued_s() -> float:
    """Returns the seconds that the calling thread waited for a processor, ready to run."""
    return int(Path("/proc/thread-self/schedstat").read_bytes().split()[1]) / 1e9


def _waits_s() -> dict[str, float]:
    """Returns how long each thread of this process has waited for a processor, ready to run."""
    waits = {}
    for thread in Path("/proc/self/task").iterdir():
        try:
            waits[thread.name] = int((thread / "schedstat").read_bytes().split()[1]) / 1e9
        except OSError:  # it has ended meanwhile
            continue
    return waits


def _stolen_s() -> list[float]:
    """Returns how long the host of this virtual machine has kept each processor from running, though it had work."""
    lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
    ticks = [int(line.split()[8]) for line in lines if re.match(r"cpu\d", line)]
    return [count / os.sysconf("SC_CLK_TCK") for count in ticks]


if __name__ == "__main__":
    main(sys.argv[1])
