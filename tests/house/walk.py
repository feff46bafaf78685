"""Which files a delta's journey runs through, from `Learner.step` to the adoption of what it contributed to.

A learner of a small torch module and a syncer with a store in a folder train in one process, joined by a loopback
socket. Once the learner is attached and has one round behind it, so that nothing is imported or connected any more,
every function call in a file of the product is recorded: from the step that makes the next delta due to the step at
whose end the version is adopted that the delta was merged into. A function that is resumed counts as a call, for it
runs. Timers that have nothing to do with a round are set so long that none fires meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import CO_OPTIMIZED
from pathlib import Path
from queue import SimpleQueue
from types import CodeType, FrameType
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import nn

from skerry.client import Learner, Policy
from skerry.store.objects.opening import open_objects
from skerry.syncer import upkeep
from skerry.syncer.host import HostSettings
from skerry.syncer.server import ServerSettings, serving
from skerry.syncer.settings import ReplicaSettings
from tests.doubles.heard_logs import logs_told_to
from tests.house.product import ROOT, SOURCE_ROOTS

# Files that a journey may run through; the goal is 45, without the metrics, targets, appends, downloads of ranges and
# messages without protobuf's copies that came later.
FILE_BOUND: Final = 68
# What a replica tells the others of its learners, in a task of its own: a slow machine ends it during the journey.
_BESIDE: Final = "/skerry/syncer/advice.py"
# Long enough that no lease, report, sweep or look into the log falls into the journey.
_NEVER_S: Final = 3600.0
_START_S: Final = 60.0
# A step takes some time, so that the answer to a delta is adopted before the next one is due.
_STEP_S: Final = 0.003
_INNER_STEP_COUNT: Final = 64
_MAX_STEPS: Final = 2000


class Recorder:
    """Notes the first call of a function of each product file, on all threads that start after it is installed."""

    def __init__(self) -> None:
        self._is_recording = False
        self._watcher = 0  # the thread whose calls are not part of the journey now
        self._first_calls: dict[str, str] = {}  # file -> the function that ran first, in the order of the first calls
        self._known: dict[CodeType, str | None] = {}
        self._prefixes = tuple(f"{ROOT / root}/skerry/" for root in SOURCE_ROOTS)

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not self._is_recording or threading.get_ident() == self._watcher:
            return
        code = frame.f_code
        if code not in self._known:
            # Bodies of modules and classes are not functions: they run when a file is imported.
            is_product = code.co_filename.startswith(self._prefixes) and code.co_flags & CO_OPTIMIZED
            is_product = is_product and not code.co_filename.endswith(_BESIDE)
            self._known[code] = code.co_filename if is_product else None
        name = self._known[code]
        if name is not None and name not in self._first_calls:
            self._first_calls[name] = code.co_qualname

    @property
    def files(self) -> dict[str, str]:
        """The files, from the root of the tree, in the order of their first call, each with the function called."""
        return {Path(name).relative_to(ROOT).as_posix(): first for name, first in self._first_calls.items()}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records what is called while the context lasts."""
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Leaves out what this thread calls while the context lasts."""
        self._watcher = threading.get_ident()
        try:
            yield
        finally:
            self._watcher = 0


def walk() -> dict[str, str]:
    """Returns the files that one delta's journey runs through, each with the function that ran first, in order."""
    recorder = Recorder()
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            logs_told_to(print, logging.CRITICAL),
            patch.object(upkeep, "_LOOK_S", _NEVER_S),
            _syncer((Path(folder) / "store").as_uri()) as target,
        ):
            _train(target, recorder)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return recorder.files


def _train(target: str, recorder: Recorder) -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    policy = Policy(inner_step_count=_INNER_STEP_COUNT, lease_term_s=_NEVER_S, snapshot_ratio=1e6)

    def train_until(version: int) -> None:
        for _ in range(_MAX_STEPS):
            with recorder.watching():
                versions, failure = learner.stats.versions, learner.failure
            if min(versions.values()) >= version:
                return
            model(torch.randn(4, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            threading.Event().wait(_STEP_S)
            learner.step(tokens=4)
        raise TimeoutError(f"version was not adopted. wanted={version}, adopted={versions}, failure={failure}")

    options: dict[str, Any] = {"create": True, "policy": policy, "fragment_count": 1}
    learner = Learner(model, target=target, run="walk", learner_id="walker", **options)
    try:
        # Until here everything is imported and connected, and the syncer has heard how long a step takes.
        train_until(3)
        with recorder.recording():
            # On a slow machine the delta of the next version is under way already; that of the one after is not.
            train_until(5)
    finally:
        learner.close()


@contextmanager
def _syncer(store_url: str) -> Iterator[str]:
    """Yields where a syncer listens, which runs on a thread of its own."""
    settings = ServerSettings(
        listen="127.0.0.1:0",
        host=HostSettings(
            sweep_s=_NEVER_S,
            idle_s=_NEVER_S,
            name_lifetime_s=_NEVER_S,
            replica=ReplicaSettings(idle_poll_s=_NEVER_S, idle_advice_s=_NEVER_S),
        ),
    )
    ports: SimpleQueue[int] = SimpleQueue()
    stop = threading.Event()

    async def serve() -> None:
        async with serving(open_objects(store_url), settings) as server:
            ports.put(server.port)
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="syncer")
    thread.start()
    try:
        yield f"127.0.0.1:{ports.get(timeout=_START_S)}"
    finally:
        stop.set()
        thread.join()


def main() -> None:
    """Prints the files in the order of their first call."""
    files = walk()
    for number, (name, first) in enumerate(files.items(), 1):
        print(f"{number:3} {name:55} {first}")


if __name__ == "__main__":
    main()
