"""The options by which a command reaches a syncer, and those of TLS."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from skerry.net.tls import Insecure, Tls
from skerry.runtime.options import TARGET, FilledPath

R = TypeVar("R")

DEFAULT_TARGET: Final = "127.0.0.1:50051"
_TARGET_HELP: Final = (
    "The syncer's address, as host:port. Replicas are separated by commas: a:443,b:443. TLS with public authorities "
    "is the default of one that is not on this machine. Or the URL of a store, as in s3://bucket/prefix: the command "
    "then starts a syncer of its own."
)
# Whether it exists is checked with its content.
PEM_FILE: Final = FilledPath(dir_okay=False)


def with_target(function: Callable[..., R]) -> Callable[..., R]:
    """Gives a command `--target` and the options of TLS, and as its keywords `target` and `tls` what a client takes."""

    @click.option("--target", type=TARGET, default=DEFAULT_TARGET, help=_TARGET_HELP)
    @click.option(
        "--insecure",
        is_flag=True,
        help="Without another option of TLS, do without it also where --target is not on this machine: everybody on "
        "the way can read and change what is sent.",
    )
    @click.option(
        "--tls-ca",
        type=PEM_FILE,
        help="Use TLS and trust the authority in this PEM file, such as the ca.pem made by `skerry keys`.",
    )
    @click.option(
        "--tls-cert",
        type=PEM_FILE,
        help="Use TLS and present this client certificate, such as one made by `skerry keys`.",
    )
    @click.option("--tls-key", type=PEM_FILE, help="The private key of --tls-cert.")
    @functools.wraps(function)
    def command(
        *args: Any, insecure: bool, tls_ca: Path | None, tls_cert: Path | None, tls_key: Path | None, **kwargs: Any
    ) -> R:
        tls = Tls(tls_ca, tls_cert, tls_key)
        chosen: Tls | Insecure | None = checked(tls) if tls != Tls() else "insecure" if insecure else None
        return function(*args, tls=chosen, **kwargs)

    return command


def checked(tls: Tls) -> Tls:
    """Returns `tls` if its files can be used.

    Raises:
        click.UsageError: they can't; the message says why.
    """
    try:
        tls.read()
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    return tls
