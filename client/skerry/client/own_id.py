"""A learner's own id, for callers that give none: the host's name and a random suffix, kept in a folder.

A process that starts again in the folder has the same id, and another one beside it a different one: a lock that ends
with the process says which process has which id. Forked children give it up, since they may live longer. Two learners
with one id would fence each other.
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

_NOT_IN_NAMES: Final = re.compile("[^a-z0-9._-]+")


def own_id(folder: Path) -> tuple[str, IO[str]]:
    """Returns an id that no other process of the folder has, and the open file whose lock keeps it.

    Raises:
        OSError: the folder can't be made or written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        file = (folder / f".learner-id-{number}").open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            continue
        file.seek(0)
        name = file.read().strip()
        if not name:
            host = _NOT_IN_NAMES.sub("-", socket.gethostname().lower())[:48].strip("-._")
            name = f"{host or 'learner'}-{SystemEntropy().hex_id()[:6]}"
            file.write(name)
            file.flush()
        os.register_at_fork(after_in_child=file.close)
        return name, file
    raise AssertionError("there is always another number")
