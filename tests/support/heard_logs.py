"""What this project's loggers say, as a test or a program of the tests hears it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Line = dict[str, Any]


class _Listener(logging.Handler):
    def __init__(self, hear: Callable[[Line], object]) -> None:
        super().__init__()
        self._hear = hear

    def emit(self, record: logging.LogRecord) -> None:
        facts, event = getattr(record, "facts", {}), getattr(record, "event", record.getMessage())
        failure = {"exc_info": record.exc_info} if record.exc_info else {}
        self._hear({**facts, **failure, "event": event, "log_level": record.levelname.lower()})


@contextmanager
def logs_told_to(hear: Callable[[Line], object], level: int = logging.DEBUG) -> Iterator[None]:
    """Calls `hear` with each line from `level` on, and shows none of them elsewhere."""
    logger, listener = logging.getLogger("skerry"), _Listener(hear)
    before = logger.level, logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [listener], False
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.handlers, logger.propagate = before[1:]
        logger.setLevel(before[0])


@contextmanager
def heard_logs() -> Iterator[list[Line]]:
    """Yields the lines, which grow while it is entered."""
    lines: list[Line] = []
    with logs_told_to(lines.append):
        yield lines


def quiet_logs() -> None:
    """Silences this project's loggers; errors too."""
    logging.getLogger("skerry").setLevel(logging.CRITICAL)
