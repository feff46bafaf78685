"""`skerry keys`: makes the certificates of a private deployment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from skerry.runtime.options import OUTPUT_FOLDER, Count
from skerry.wire.identity import Identity, Role

if TYPE_CHECKING:
    from skerry.cli.authority import Wanted

_SERVER_HELP: Final = (
    "Make a certificate for a server with these names or IP addresses, to which localhost is added. May be repeated."
)
_LEARNER_HELP: Final = "Make a client certificate for a learner, of one run or of any. May be repeated."


@click.command(
    epilog="""\b
Examples:
  skerry keys keys --server a.example,10.0.0.1 --learner us-east --learner eu-west --admin anna
  skerry keys keys --learner gpt/asia-1       one learner more, of the run gpt only, from the same authority
  skerry keys keys --server a.example,10.0.0.1 --renew       a new key and certificate in place of the old
"""
)
@click.argument("folder", metavar="DIR", type=OUTPUT_FOLDER)
@click.option("--server", "servers", multiple=True, metavar="HOST[,HOST...]", help=_SERVER_HELP)
@click.option("--learner", "learners", multiple=True, metavar="[RUN/]ID", help=_LEARNER_HELP)
@click.option("--reader", "readers", multiple=True, metavar="NAME", help="Make a client certificate for a reader.")
@click.option(
    "--admin", "admins", multiple=True, metavar="NAME", help="Make a client certificate for an administrator."
)
@click.option("--days", type=Count(1, 3650), default=365, help="How long the certificates are valid.")
@click.option("--renew", is_flag=True, help="Replace certificates, and their keys, that are there already.")
def keys(
    *,
    folder: Path,
    servers: tuple[str, ...],
    learners: tuple[str, ...],
    readers: tuple[str, ...],
    admins: tuple[str, ...],
    days: int,
    renew: bool,
) -> None:
    """Make a private authority in DIR, and certificates that it signs, for TLS between syncers and their clients.

    The first call makes the authority, ca.pem and ca.key, which is valid for ten years; later calls add certificates.
    Each is a pair of files, NAME.pem and NAME.key. What is there already is kept, unless --renew is given.

    Keep ca.key here: anybody who has it can make certificates that all accept. Give every machine ca.pem and its own
    pair.
    """
    from skerry.cli.authority import Authority, client, server

    try:
        wanted = [server(hosts) for hosts in servers]
        wanted += [client(Role.LEARNER, name) for name in learners]
        wanted += [client(Role.READER, name) for name in readers] + [client(Role.ADMIN, name) for name in admins]
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    names = ["ca", *(one.name for one in wanted)]
    if len(set(names)) < len(names):
        raise click.UsageError(f"two certificates can't have the same file name. names={', '.join(names)}")
    try:
        authority = Authority(folder, datetime.now(UTC))
        _say("made" if authority.is_new else "kept", folder / "ca.pem", authority.certificate.not_valid_after_utc)
        for one in wanted:
            found = None if renew else authority.find(one)
            made = found or authority.make(one, days)
            _say("kept" if found else "made", folder / f"{one.name}.pem", made.not_valid_after_utc, one.uri)
    except (ValueError, OSError) as error:
        raise click.ClickException(f"{error}. folder={folder}") from error
    click.echo("\nnext:")
    for line in _next(folder, wanted):
        click.echo(f"  {line}")


def _say(verb: str, file: Path, end: datetime, uri: str = "") -> None:
    click.echo(f"{verb}  {file}  until {end:%Y-%m-%d}  {uri}".rstrip())


def _next(folder: Path, wanted: Iterable[Wanted]) -> Iterator[str]:
    """Yields what to type, or to do, with these certificates."""
    host = "HOST"
    for one in wanted:
        pair = f"--tls-cert {folder / one.name}.pem --tls-key {folder / one.name}.key"
        if one.role == "server":
            host = one.name
            yield f"skerry serve --listen 0.0.0.0:50051 {pair} --tls-client-ca {folder / 'ca.pem'}"
        else:
            found = Identity.parse(one.uri)
            run = f"{found.run} " if found.run else ""
            command = f"learn {run}--learner-id {found.name}" if found.role is Role.LEARNER else "runs list"
            yield f"skerry {command} --target {host}:50051 --tls-ca {folder / 'ca.pem'} {pair}"
    if not wanted:
        yield f"skerry keys {folder} --server HOST --learner ID"
    yield f"give each machine {folder / 'ca.pem'} and its own two files; keep {folder / 'ca.key'} here"
