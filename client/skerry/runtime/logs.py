"""Logging: structlog's calls, which end in the standard library's loggers of the same names.

A library's user decides what is shown, by `logging.getLogger("skerry")`. By default these are warnings and
errors, on standard error, and the few lines of `announce`; nothing here sets up anything before a command calls
`log_to_stderr`.
"""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Any, Final, cast

import structlog
from rich.console import Console
from structlog.typing import EventDict

from skerry.runtime.redaction import redacted

# Longer than any message of this project, and short enough that refused calls can't fill the disk with log lines.
_MOST_TEXT: Final = 1000
# structlog calls three functions of its own before logging, which must not be taken for the caller.
_STACK_LEVEL: Final = 4
_FACTS: Final = structlog.processors.LogfmtRenderer()
_LINE: Final = structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"])


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """Returns a module's logger; that of skerry_syncer.x is `logging.getLogger("skerry.syncer.x")`.

    A record has the message `event key=value ...`; the parts are its attributes `event` and `facts`.
    """
    logger = structlog.wrap_logger(
        logging.getLogger(name.replace("skerry_", "skerry.", 1)),
        processors=[structlog.stdlib.filter_by_level, _as_record],
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    return cast("structlog.stdlib.BoundLogger", logger)


def announce(logger: structlog.stdlib.BoundLogger, event: str, **facts: object) -> None:
    """Tells people what they want to know whatever they log: an info that standard error gets if logging hides it.

    A program that wants silence sets a level of its own for "skerry".
    """
    logger.info(event, **facts)
    if not logging.getLogger(logger.name).isEnabledFor(logging.INFO) and not logging.getLogger("skerry").level:
        print(f"skerry: {event} {_FACTS(logger, 'info', dict(facts))}".rstrip(), file=sys.stderr)  # noqa: T201 - it is for people


def log_to_stderr(level: str = "info") -> None:
    """Writes this process's logs to standard error, one a line, in place of any before; for commands.

    A terminal gets the time of day, the level, the message and its facts, in colours; a pipe or a file gets
    `timestamp= level= event= ...`. URLs' secrets are taken out, and texts that a caller may have chosen are cut.
    """
    handler = logging.StreamHandler()
    terminal = Console(file=handler.stream)  # which knows NO_COLOR and terminals that have none
    has_colours = terminal.color_system is not None and not terminal.no_color
    short = structlog.dev.ConsoleRenderer(pad_event_to=0, pad_level=False, sort_keys=False, colors=has_colours)
    handler.setFormatter(_Formatter(short if terminal.is_terminal else _LINE))
    logger = logging.getLogger("skerry")
    logger.handlers = [handler]
    logger.setLevel(level.upper())


class _Formatter(logging.Formatter):
    """One line for each record of this project's loggers, and its traceback, as `exception` or below the line."""

    def __init__(self, render: structlog.typing.Processor) -> None:
        super().__init__()
        self._render = render

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line: with the time in UTC, and for people with the local time of day."""
        time = datetime.fromtimestamp(record.created, UTC)
        is_short = self._render is not _LINE
        text = time.astimezone().strftime("%H:%M:%S") if is_short else time.isoformat().replace("+00:00", "Z")
        event: dict[str, Any] = {"timestamp": text, "level": record.levelname.lower(), **_event(record)}
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return str(self._render(None, record.levelname, _bounded_text(event)))


def _event(record: logging.LogRecord) -> dict[str, Any]:
    return {"event": getattr(record, "event", record.getMessage()), **getattr(record, "facts", {})}


def _bounded_text(event: EventDict) -> EventDict:
    """Takes secrets out of every text, and cuts what a client may have chosen; tracebacks stay whole."""
    for key, value in event.items():
        if isinstance(value, str):
            event[key] = redacted(value)[: None if key == "exception" else _MOST_TEXT]
    return event


def _as_record(logger: object, method: str, event: EventDict) -> Any:
    """Returns the arguments for a method of `logging.Logger`."""
    text, exc_info = event.pop("event"), event.pop("exc_info", None)
    message = f"{text} {_FACTS(logger, method, event)}" if event else text
    extra = {"event": text, "facts": event}
    return (message,), {"exc_info": exc_info, "extra": extra, "stacklevel": _STACK_LEVEL}
