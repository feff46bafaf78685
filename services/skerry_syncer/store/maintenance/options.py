"""What the operator's commands have in common: how they name a run of a store, open it, and report."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial, reduce
from typing import Any, Final, TypeVar

import click

from skerry.runtime.clock import SystemClock
from skerry.runtime.identifiers import SystemEntropy
from skerry.runtime.logs import log_to_stderr
from skerry.runtime.options import Parsed, run_argument
from skerry.runtime.workers import ThreadWorkers
from skerry.wire.layout import check_id, check_name
from skerry_syncer.store.errors import LogCorruptError, RunNotFoundError, StoreRefusedError, StoreURLError
from skerry_syncer.store.objects.opening import open_objects, parse_url
from skerry_syncer.store.objects.put_if_absent import check_put_if_absent
from skerry_syncer.store.store import Store
from skerry_syncer.store.versions.run import Run

_WORKER_COUNT: Final = 2
_UNITS_S: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}

Function = TypeVar("Function", bound=Callable[..., Any])


def seconds(text: str) -> float:
    """Returns the seconds of a duration that a person wrote: 90s, 15m, 12h, 7d, 2w.

    Raises:
        ValueError: it is no duration.
    """
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhdw])", text)
    if match is None:
        raise ValueError(f"{text[:100]!r} is not a duration; write a number and s, m, h, d or w, as in 12h")
    return float(match[1]) * _UNITS_S[match[2]]


def position_or_seconds(text: str) -> int | float:
    """Returns a log position, or as a float the seconds of a duration.

    Raises:
        ValueError: it is neither.
    """
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else seconds(text)


def _store_url(text: str) -> str:
    try:
        parse_url(text)
    except StoreURLError as error:
        raise ValueError(str(error)) from error
    return text


# Types of options.
DURATION: Final = Parsed("duration", seconds)
POSITION_OR_DURATION: Final = Parsed("position", position_or_seconds)
STORE: Final = Parsed("url", _store_url)
UID: Final = Parsed("uid", partial(check_id, kind="uid"))


def store_and_run_options(*, is_run_required: bool) -> Callable[[Function], Function]:
    """Returns what gives a command these options; without `is_run_required` it may be about all runs."""
    options = (
        click.option(
            "--uid",
            type=UID,
            help="The run's uid, for a draft or a deleted run.  [default: the uid of the run that has the name]",
        ),
        run_argument(partial(check_name, kind="run"), is_optional=not is_run_required),
        click.option(
            "--store",
            "store_url",
            type=STORE,
            default="file://./skerry-data",  # where `skerry serve` keeps it
            show_default=True,
            help="Where the run is stored: file://folder, as in file:///var/lib/skerry, or s3://, gs:// or az://bucket/prefix.",
        ),
    )
    return lambda function: reduce(lambda command, option: option(command), options, function)


# Gives a command the options that say which run of which store.
run_options: Final = store_and_run_options(is_run_required=True)


@asynccontextmanager
async def opened_store(store_url: str, *, writes: bool = False) -> AsyncIterator[Store]:
    """Opens a store, and closes everything after; what is logged meanwhile goes to standard error.

    Raises:
        StoreURLError: it can't be used, or for a caller that `writes` not safely.
        click.BadParameter: it has no such bucket, or refuses the credentials.
    """
    log_to_stderr()
    objects = open_objects(store_url, writes=writes, new=False)
    if writes:
        await check_put_if_absent(objects, SystemEntropy())
    workers = ThreadWorkers(_WORKER_COUNT)
    store = Store(objects, clock=SystemClock(), entropy=SystemEntropy(), workers=workers, writer="command")
    try:
        yield store
    except StoreRefusedError as error:
        raise click.BadParameter(str(error), param_hint="--store") from error
    finally:
        await store.close()
        workers.close()


@asynccontextmanager
async def opened_run(store_url: str, run_name: str, uid: str | None) -> AsyncIterator[Run]:
    """Opens a run for reading, its log folded to its end or its last good entry, and closes everything after."""
    async with opened_store(store_url) as store:
        yield await store.read_run(run_name, uid or await resolved(store, run_name))


async def resolved(store: Store, run_name: str) -> str:
    """Returns the uid of the run that has the name.

    Raises:
        RunNotFoundError: none has; the message lists the runs that exist.
    """
    uid = await store.resolve(run_name)
    if uid is None:
        names = [name for name, _ in await store.list_runs()]
        raise RunNotFoundError(f"run does not exist. run={run_name}, runs={names}")
    return uid


def warn_of_damage(failure: LogCorruptError | None, position: int) -> bool:
    """Says on standard error at which position reading stopped because the log is damaged; returns whether it is."""
    if failure is not None:
        click.echo(f"damaged: {failure}", err=True)
        click.echo(f"this goes up to position {position}; restore the entry after it from a backup", err=True)
    return failure is not None


def report(values: Mapping[str, Any], lines: Iterable[str], *, is_json: bool) -> None:
    """Prints a command's result: the values for scripts in one line, or the lines for people."""
    for line in [json.dumps(values)] if is_json else lines:
        click.echo(line)
