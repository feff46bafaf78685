"""Skerry: `skerry serve` with a durable store of files, and its array learner."""

from __future__ import annotations

import subprocess
import sys
import time
from argparse import Namespace
from typing import Any, Final
from unittest.mock import patch

from benchmarks.rivals.peers import model
from benchmarks.rivals.peers.dialogue import converse
from skerry.client import ArrayLearner, Policy
from skerry.client.movement import Movement

# More than the steps that a synchronisation waits for its versions, so that none makes a second delta due.
_H: Final = 4096
_EARLY: Final = 512
_STEP_S: Final = 0.005
_TIMEOUT_S: Final = 120.0


class Learner:
    """A learner whose rounds wait for all."""

    def __init__(self, arguments: Namespace) -> None:
        self._arrays = model.arrays()
        # Its samples would let other threads run between two steps that are to be one moment; nothing is trained here.
        patch.object(Movement, "trained").start()
        self._learner = ArrayLearner(
            self._arrays,
            target=arguments.target,
            run="rivals",
            learner_id=f"learner-{arguments.number}",
            create=True,
            policy=Policy(
                inner_step_count=_H,
                quorum_count=arguments.learners,
                lease_term_s=60.0,
                kept_version_count=1,
                kept_hours=0.0,
                kept_day_count=0,
            ),
            connect_timeout_s=_TIMEOUT_S,
        )
        self._step(_H)

    def weights(self) -> list[Any]:
        """Returns the arrays."""
        return list(self._arrays.values())

    def prepare(self) -> None:
        """Takes all steps but the last few."""
        self._step(_H - _EARLY)

    def synchronise(self) -> None:
        """Takes the steps that make a delta of each fragment due, and goes on until each has its next version."""
        wanted = {name: version + 1 for name, version in self._learner.stats.versions.items()}
        deadline_s = time.monotonic() + _TIMEOUT_S
        self._step(_EARLY)
        while any(self._learner.stats.versions[name] < version for name, version in wanted.items()):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"no synchronisation. versions={self._learner.stats.versions}, wanted={wanted}")
            time.sleep(_STEP_S)
            self._learner.step(tokens=1)

    def _step(self, count: int) -> None:
        for _ in range(count):
            self._learner.step(tokens=1)


def serve(arguments: Namespace) -> str:
    """Starts a syncer, and returns its address."""
    port_file, store = arguments.folder / "port", arguments.folder / "store"
    options = ["--listen", "127.0.0.1:0", "--port-file", str(port_file), "--store", store.as_uri()]
    options += ["--scratch", str(arguments.folder / "scratch"), "--log-level", "warning"]
    process = subprocess.Popen([sys.executable, "-B", "-m", "skerry.cli.main", "serve", *options])
    deadline_s = time.monotonic() + _TIMEOUT_S
    while not (port_file.exists() and port_file.read_text()):
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError("syncer did not start")
        time.sleep(0.05)
    return f"127.0.0.1:{int(port_file.read_text())}"


if __name__ == "__main__":
    converse(serve, Learner)
