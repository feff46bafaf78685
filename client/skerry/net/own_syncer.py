"""A syncer of this process's own, where a target is the URL of a store: two learners and a bucket need nothing else.

Any number of syncers may serve one store, so a process that is given a store in place of a syncer's address starts
`skerry serve` over it as a child and calls that over a Unix socket, in a folder that only this user may enter. The
child is started again if it fails. It hears the end of this process, however that ends, as the end of its standard
input, and no signal of a terminal. A process has one for each store, and clients share it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections import deque
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from shutil import rmtree
from typing import Final

from skerry.errors import RefusedError, error_of
from skerry.net.forks import OwnProcess
from skerry.runtime.addresses import is_store
from skerry.runtime.logs import get_logger
from skerry.runtime.redaction import redacted

_log = get_logger(__name__)

# How long a syncer may take to finish pushes and merges once it is not needed.
_DRAIN_S: Final = 20.0
# Between the end of a syncer that failed and the start of the next.
_RESTART_S: Final = 2.0
# The longest path of a socket is 103 bytes on macOS.
_MOST_FOLDER_BYTES: Final = 80
_LISTENING: Final = "listening on "


class OwnSyncer:
    """A child process that serves a store to this process, until `close`."""

    def __init__(self, store_url: str, *, is_new: bool) -> None:
        """With `is_new` it begins a store in a folder that has none."""
        self.store_url = store_url
        self.user_count = 0
        self.process = OwnProcess()
        root = None if len(os.fsencode(tempfile.gettempdir())) < _MOST_FOLDER_BYTES else "/tmp"  # noqa: S108 - as short as can be
        self._folder = Path(tempfile.mkdtemp(prefix="skerry-", dir=root))
        self.target = f"unix:{self._folder}/socket"
        # What the learner's environment and settings file say is not meant for its syncer.
        command = [sys.executable, "-P", "-m", "skerry.cli", "--config", os.devnull, "serve", "--log-level", "warning"]
        options = ["--store", store_url, "--socket", f"{self._folder}/socket", "--listen", "127.0.0.1:0"]
        self._command = [*command, *options, *(["--new-store"] if is_new else [])]
        variables = os.environ.items()  # noqa: TID251 - the bucket's credentials are there
        self._environment = {name: value for name, value in variables if not name.startswith("SKERRY_")}
        self._directory = Path.cwd()
        self._said: deque[str] = deque(maxlen=20)  # its last lines, until it listens
        self._is_known = threading.Event()  # whether it listens or has failed
        self._is_refused = False
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] = self._spawn()
        self._watching = threading.Thread(target=self._watch, name="skerry-own-syncer", daemon=True)
        self._watching.start()

    def wait(self, timeout_s: float) -> None:
        """Returns once it listens.

        Raises:
            RefusedError: STORE_REFUSED: no syncer can work with the store.
            TryAgainError: STORE_UNAVAILABLE: the store did not answer in time.
        """
        is_known = self._is_known.wait(timeout_s)
        said = " ".join(self._said)
        facts = f"store={redacted(self.store_url)}"
        if self._is_refused:
            error = said.partition("error: ")[2].partition(" next: ")[0].removeprefix("Invalid value for --store: ")
            cause = error or said or f"status {self._child.returncode}"
            raise RefusedError("STORE_REFUSED", f"no syncer can be started over the store. {facts}, because={cause}")
        if not is_known:
            raise error_of("STORE_UNAVAILABLE", f"the store did not answer in time. {facts}, {timeout_s=}, said={said}")

    def close(self) -> None:
        """Ends the child once its pushes and merges have ended. Idempotent."""
        self._closing.set()
        with self._lock:
            child = self._child
        self.let_go()
        try:
            child.wait(2 * _DRAIN_S)
        except subprocess.TimeoutExpired:
            child.kill()
        self._watching.join()
        rmtree(self._folder, ignore_errors=True)

    def let_go(self) -> None:
        """Closes this process's end of the child's standard input, which ends the child when no process has one."""
        assert self._child.stdin is not None
        with suppress(OSError):
            self._child.stdin.close()

    def _spawn(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=self._environment,
            cwd=self._directory,
            start_new_session=True,  # Ctrl-C in a terminal reaches the learner, which has work to send
        )

    def _watch(self) -> None:
        while True:
            self._listen()
            status = self._child.wait()
            if not self._is_known.is_set():
                self._is_refused = True
                self._is_known.set()
            with self._lock:
                if self._is_refused or self._closing.wait(_RESTART_S):
                    return
                _log.warning("the syncer of this process's own has ended and is started again", status=status)
                self._child = self._spawn()

    def _listen(self) -> None:
        """Returns when the child has ended; says what it says, once it listens."""
        assert self._child.stdout is not None
        with self._child.stdout as lines:
            for line in lines:
                if line.startswith(_LISTENING):
                    self._is_known.set()
                elif self._is_known.is_set():
                    _log.warning(line.strip())
                else:
                    self._said.append(line.strip())


_SYNCERS: Final[dict[str, OwnSyncer]] = {}  # by the URL of the store
_LOCK: Final = threading.Lock()


def reached(target: str, closing: ExitStack, *, is_new: bool = False, timeout_s: float) -> str:
    """Returns what to call until `closing` is closed: the target, or this process's own syncer over a store.

    With `is_new` a store is begun in a folder that has none.

    Raises:
        RefusedError, TryAgainError: as `OwnSyncer.wait`.
    """
    if not is_store(target):
        return target
    _keep_from_children()
    with _LOCK:
        syncer = _SYNCERS.get(target)
        if syncer is None or syncer.process.is_forked:
            syncer = _SYNCERS[target] = OwnSyncer(target, is_new=is_new)
        syncer.user_count += 1
    closing.callback(_release, syncer)
    syncer.wait(timeout_s)
    return syncer.target


def _release(syncer: OwnSyncer) -> None:
    with _LOCK:
        syncer.user_count -= 1
        if syncer.user_count or syncer.process.is_forked:
            return
        del _SYNCERS[syncer.store_url]
    syncer.close()


@cache
def _keep_from_children() -> None:
    os.register_at_fork(after_in_child=_let_go)


def _let_go() -> None:
    """Has forked children, such as workers of a DataLoader, keep no syncer alive that their parent started."""
    for syncer in _SYNCERS.values():
        syncer.let_go()
