"""How a command reaches its syncer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from skerry.client import RunsClient

R = TypeVar("R")

DEFAULT_TARGET: Final = "127.0.0.1:50051"


def with_client(function: Callable[..., R]) -> Callable[..., R]:
    """Gives a command `--target` and `--timeout`, and the client that they describe as its keyword `client`."""

    @click.option("--target", default=DEFAULT_TARGET, help="The syncer, as host:port.")
    @click.option(
        "--timeout",
        "timeout_s",
        type=click.FloatRange(min=0, min_open=True),
        default=30.0,
        help="Seconds to wait for an answer.",
    )
    @functools.wraps(function)
    def command(*args: Any, target: str, timeout_s: float, **kwargs: Any) -> R:
        with RunsClient(target, timeout_s=timeout_s) as client:
            return function(*args, client=client, **kwargs)

    return command


def with_run(function: Callable[..., R]) -> Callable[..., R]:
    """Gives a command its run, as an argument or as `--run`, as its keyword `run`."""

    @click.argument("run_argument", metavar="[RUN]", required=False)
    @click.option("--run", "run_option", metavar="RUN", help="The run's name, where it is not the argument.")
    @functools.wraps(function)
    def command(*args: Any, run_argument: str | None, run_option: str | None, **kwargs: Any) -> R:
        # The argument wins: --run may come from the environment or the settings file.
        run = run_argument or run_option
        if not run:
            raise click.UsageError("name the run: as the argument, as --run, as SKERRY_RUN, or as run in the settings")
        return function(*args, run=run, **kwargs)

    return command
