"""Clients that are refused although their certificates are valid: a file that is read again when it changes."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from skerry.runtime.clock import Clock
from skerry.wire.identity import Identity
from skerry_syncer.access.reloading import Reloaded
from skerry_syncer.errors import SyncerError

_LOOK_S: Final = 1.0


class DenyList:
    """Identities of a file, one URI such as skerry://learner/us a line; text after # is a comment.

    Raises:
        ValueError: the file can't be used.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        self._clock = clock
        self._denied = Reloaded("deny list", lambda _: _clients_of(path))
        self._looked_s = clock.monotonic_s()

    def check(self, caller: Identity) -> None:
        """Raises SyncerError, PERMISSION_DENIED, if the caller is on the list as it was a second ago or later."""
        if (now_s := self._clock.monotonic_s()) > self._looked_s + _LOOK_S:
            self._looked_s = now_s
            self._denied.now()
        if caller in self._denied.value:
            raise SyncerError("PERMISSION_DENIED", f"the server's deny list has the client. caller={caller}")


def _clients_of(path: Path) -> frozenset[Identity]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return frozenset(Identity.parse(uri) for line in lines if (uri := line.partition("#")[0].strip()))
    except (OSError, ValueError) as error:
        raise ValueError(f"deny list can't be used. file={path}, because={error}") from error
