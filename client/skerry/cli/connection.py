"""The options by which a command reaches a syncer and names a run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

import click

from skerry import RunsClient, Tls
from skerry.net.tls import Insecure
from skerry.net.tls_options import with_target
from skerry.runtime.options import Number, Parsed, run_argument
from skerry.wire.layout import check_id, check_name

R = TypeVar("R")


def with_client(function: Callable[..., R]) -> Callable[..., R]:
    """Gives a command `--target`, `--timeout` and the options of TLS, and the resulting client as keyword `client`."""

    @click.option(
        "--timeout", "timeout_s", type=Number(0, min_open=True), default=30.0, help="Seconds to wait for an answer."
    )
    @with_target
    @functools.wraps(function)
    def command(*args: Any, target: str, timeout_s: float, tls: Tls | Insecure | None, **kwargs: Any) -> R:
        with RunsClient(target, tls=tls, timeout_s=timeout_s) as client:
            return function(*args, client=client, **kwargs)

    return command


# Gives a command its run as the keyword `run`.
with_run: Final = run_argument(partial(check_name, kind="run"))
# A run's uid, as an option's type.
UID: Final = Parsed("uid", partial(check_id, kind="uid"))
