"""Follows a run across streams that break, end, or begin before the run exists."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from skerry import RunsClient, SkerryError
from skerry.errors import RunNotFoundError, error_of, is_transient
from skerry.net.retry import RetrySettings
from skerry.runtime.clock import SystemClock, ThreadClock
from skerry.runtime.identifiers import system_random
from skerry.v1 import types_pb2 as v1
from skerry.v1.exchange_pb2 import WatchStart
from skerry.v1.types_pb2 import Event

_PAUSES: Final = RetrySettings(first_wait_s=0.5)


def follow(
    client: RunsClient,
    run: str,
    *,
    after_position: int = 0,
    patience_s: float = 300.0,
    until_closed: bool = True,
    clock: ThreadClock | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Iterator[WatchStart | Event]:
    """Yields every message; after a broken stream it continues at the last position seen.

    It ends when the run is closed, or else goes on, because judges report of a run's last version after that.

    `tell` hears why a stream broke, once for each new reason.

    Raises:
        SkerryError: the call was refused, or no stream began for longer than `patience_s`; meanwhile a run that does
            not exist may be created.
    """
    clock = clock or SystemClock()
    broke_at_s, uid, attempt, notice = 0.0, "", 0, ""
    while True:
        try:
            for message in client.watch(run, uid=uid, after_position=after_position):
                attempt, notice = 0, ""
                yield message
                if isinstance(message, Event):
                    after_position = max(after_position, message.position)
                    is_over = message.status_changed == v1.RUN_STATUS_CLOSED
                else:  # a closed run that was asked for its past has yet to tell it
                    uid = message.run.uid
                    is_closed = message.run.status == v1.RUN_STATUS_CLOSED
                    is_over = is_closed and not 0 < after_position < message.run.position
                if is_over and until_closed:
                    return
            raise error_of("UNREACHABLE", "the syncer ended the stream")  # as a replica does that drains
        except SkerryError as error:
            if attempt == 0:  # nothing may have happened for long before the stream broke
                broke_at_s = clock.monotonic_s()
            is_missing = isinstance(error, RunNotFoundError) and not uid
            if not (is_missing or is_transient(error)) or clock.monotonic_s() - broke_at_s > patience_s:
                raise
            attempt += 1
            if (reason := f"{'waiting' if is_missing else 'reconnecting'}: {error}") != notice:
                tell(reason)
            notice = reason
            clock.block(_PAUSES.wait_s(attempt, error, system_random()))
