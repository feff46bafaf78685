"""The options by which a command reaches a syncer and names a run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from skerry.client import RunsClient, Tls
from skerry.runtime.tls import Insecure
from skerry.runtime.tls_options import with_tls

R = TypeVar("R")

DEFAULT_TARGET: Final = "127.0.0.1:50051"
_TARGET_HELP: Final = "The syncer's address, as host:port. Replicas are separated by commas: a:443,b:443."


def with_client(function: Callable[..., R]) -> Callable[..., R]:
    """Gives a command `--target`, `--timeout` and the options of TLS, and the resulting client as keyword `client`."""

    @click.option("--target", default=DEFAULT_TARGET, help=_TARGET_HELP)
    @click.option(
        "--timeout",
        "timeout_s",
        type=click.FloatRange(min=0, min_open=True),
        default=30.0,
        help="Seconds to wait for an answer.",
    )
    @with_tls
    @functools.wraps(function)
    def command(*args: Any, target: str, timeout_s: float, tls: Tls | Insecure | None, **kwargs: Any) -> R:
        try:
            client = RunsClient(target, tls=tls, timeout_s=timeout_s)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--target") from error
        with client:
            return function(*args, client=client, **kwargs)

    return command


run_option: Final = click.option("--run", "run_option", metavar="RUN", help="The run's name, instead of the argument.")


def with_run(function: Callable[..., R]) -> Callable[..., R]:
    """Gives a command an argument or option `--run`, and the run's name as its keyword `run`."""

    @click.argument("run_argument", metavar="[RUN]", required=False)
    @run_option
    @functools.wraps(function)
    def command(*args: Any, run_argument: str | None, run_option: str | None, **kwargs: Any) -> R:
        return function(*args, run=run_of(run_argument, run_option), **kwargs)

    return command


def run_of(*places: str | None) -> str:
    """Returns the run's name from the first place that has one: the argument, then --run, which may be set elsewhere.

    Raises:
        click.UsageError: there is none.
    """
    for run in filter(None, places):
        return run
    raise click.UsageError(
        "the run is missing. Name it as the argument, by --run, in SKERRY_RUN, or as run in the settings file"
    )
