"""How many files and connections this process may have open."""

from __future__ import annotations

import resource
from contextlib import suppress
from typing import Final

# Files of the store, of scratch and of the process itself; the rest of the limit is for connections.
_OWN_FILES: Final = 256
# A thousand learners with four each.
_MOST_CONNECTIONS: Final = 4096


def most_connections() -> int:
    """Raises this process's limit of open files as far as it may, and returns how many of them connections may take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OWN_FILES + _MOST_CONNECTIONS
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # then the old limit holds
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    files = wanted if soft == resource.RLIM_INFINITY else soft
    return min(_MOST_CONNECTIONS, max(files // 2, files - _OWN_FILES))
