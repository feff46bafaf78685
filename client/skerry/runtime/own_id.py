"""A learner's own id, for callers that give none: the host's name and a random suffix, kept in a folder.

A process that starts again in the folder has the same id, and another one beside it a different one: a lock that ends
with the process says which process has which id. Forked children give it up, since they may live longer. Two learners
with one id would fence each other, so an id counts only on the host and in the file where it was made: a folder that
was copied, to another machine for example, has new ones.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import socket
from pathlib import Path
from typing import IO, Final

from skerry.runtime.identifiers import SystemEntropy
from skerry.runtime.logs import get_logger

_log = get_logger(__name__)

_NOT_IN_NAMES: Final = re.compile("[^a-z0-9._-]+")


def own_id(folder: Path) -> tuple[str, IO[str] | None]:
    """Returns an id that no other process has, and the open file whose lock keeps it.

    Where nothing can be kept in the folder, or it has no locks, the id is a new one at each start, without a file.
    """
    try:
        return _kept_id(folder)
    except OSError as error:
        name = _new_id()
        _log.warning(
            "this learner can't keep its id, and has another one when it starts again. Give it a learner_id",
            learner=name,
            folder=str(folder.absolute()),
            because=error.strerror,
        )
        return name, None


def _kept_id(folder: Path) -> tuple[str, IO[str]]:
    folder.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        file = (folder / f".learner-id-{number}").open("a+", encoding="ascii", errors="replace")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            name = _name_in(file)
        except OSError as error:
            file.close()
            if isinstance(error, BlockingIOError):
                continue
            raise
        os.register_at_fork(after_in_child=file.close)
        return name, file
    raise AssertionError("there is always another number")


def _name_in(file: IO[str]) -> str:
    """Returns the id that a locked file holds, or writes one; a copy of a file may have the id of another learner."""
    file.seek(0)
    name, _, inode = file.read().strip().partition(" ")
    is_own = inode == str(os.fstat(file.fileno()).st_ino) and name.startswith(f"{_host()}-")
    if not is_own or _NOT_IN_NAMES.search(name):
        name = _new_id()
        file.truncate(0)
        file.write(f"{name} {os.fstat(file.fileno()).st_ino}\n")
        file.flush()
    return name


def _new_id() -> str:
    return f"{_host()}-{SystemEntropy().hex_id()[:6]}"


def _host() -> str:
    return _NOT_IN_NAMES.sub("-", socket.gethostname().lower())[:48].strip("-._") or "learner"
