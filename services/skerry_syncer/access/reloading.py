"""Files that are read again while the syncer runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, TypeVar

from skerry.runtime.logs import get_logger

T = TypeVar("T")

_LOG: Final = get_logger(__name__)


class Reloaded(Generic[T]):
    """What a file holds now, or last held while it could be used; a warning is logged for each new reason.

    Raises:
        ValueError: the file can't be used at the beginning.
    """

    def __init__(self, name: str, read: Callable[[T | None], T]) -> None:
        """`read` takes what is in force, to return it if the file has not changed; it raises ValueError if it can't."""
        self._name = name
        self._read = read
        self.value = read(None)
        self._problem = ""

    def now(self) -> T:
        """Reads the file and returns what is in force."""
        try:
            value = self._read(self.value)
        except ValueError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                _LOG.warning(f"{self._name} can't be reloaded, what was read before stays in force", because=str(error))
            return self.value
        if value != self.value:
            _LOG.info(f"{self._name} reloaded")
        self.value, self._problem = value, ""
        return value
