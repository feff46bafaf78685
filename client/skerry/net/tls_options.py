"""The options by which a command connects with TLS."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from skerry.net.tls import Insecure, Tls
from skerry.runtime.options import FilledPath

R = TypeVar("R")

# Whether it exists is checked with its content.
PEM_FILE: Final = FilledPath(dir_okay=False)


def with_tls(function: Callable[..., R]) -> Callable[..., R]:
    """Gives a command the options of a TLS client, and as its keyword `tls` what a client of the library takes."""

    @click.option(
        "--tls",
        "is_tls",
        is_flag=True,
        help="Use TLS and trust public authorities, as is the default for a --target that is not on this machine.",
    )
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
        *args: Any,
        is_tls: bool,
        insecure: bool,
        tls_ca: Path | None,
        tls_cert: Path | None,
        tls_key: Path | None,
        **kwargs: Any,
    ) -> R:
        tls = Tls(tls_ca, tls_cert, tls_key)
        is_wanted = is_tls or tls != Tls()
        chosen: Tls | Insecure | None = checked(tls) if is_wanted else "insecure" if insecure else None
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
