"""Clients that are refused although their certificates are valid: a file that is read again when it changes."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from skerry.runtime.clock import Clock
from skerry.runtime.logs import get_logger
from skerry.wire.identity import Identity
from skerry_syncer.errors import SyncerError

_LOG: Final = get_logger(__name__)
_LOOK_S: Final = 1.0


class DenyList:
    """Identities of a file, one URI such as skerry://learner/us a line; text after # is a comment.

    While the file can't be used, the last list that could be stays in force, and a warning is logged for each reason.

    Raises:
        ValueError: the file can't be used.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._text, self._denied = self._read("")
        self._problem = ""
        self._looked_s = self._clock.monotonic_s()

    def check(self, caller: Identity) -> None:
        """Raises SyncerError, PERMISSION_DENIED, if the caller is on the list as it was a second ago or later."""
        if (now_s := self._clock.monotonic_s()) > self._looked_s + _LOOK_S:
            self._looked_s = now_s
            self._reload()
        if caller in self._denied:
            raise SyncerError("PERMISSION_DENIED", f"the server's deny list has the client. caller={caller}")

    def _reload(self) -> None:
        try:
            text, denied = self._read(self._text)
        except ValueError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                _LOG.warning("deny list can't be reloaded, the old one stays in force", because=str(error))
            return
        self._problem = ""
        if text != self._text:
            self._text, self._denied = text, denied
            _LOG.info("deny list reloaded", file=str(self._path), clients=len(denied))

    def _read(self, known: str) -> tuple[str, frozenset[Identity]]:
        try:
            text = self._path.read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"deny list can't be read. file={self._path}, because={error.strerror}") from error
        if text == known:
            return text, frozenset()
        uris = filter(None, (line.partition("#")[0].strip() for line in text.splitlines()))
        try:
            return text, frozenset(map(Identity.parse, uris))
        except ValueError as error:
            raise ValueError(f"deny list has a line that is no client. file={self._path}, because={error}") from error
