"""`skerry keys`: makes the certificates of a private deployment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from skerry.runtime.options import OUTPUT_FOLDER, Count, Parsed
from skerry.wire.identity import Role

if TYPE_CHECKING:
    from skerry.cli.authority import Wanted

_SERVER_HELP: Final = (
    "Make a certificate for a server with these names or IP addresses, to which localhost is added. May be repeated."
)
_LEARNER_HELP: Final = "Make a client certificate for a learner, of one run or of any. May be repeated."


def _organisation(text: str) -> str:
    if not (text.strip() and text.isprintable() and len(text) <= 64):
        raise ValueError(f"an organisation is 1 to 64 printable characters. organisation={text[:80]!r}")
    return text


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
@click.option(
    "--organisation",
    type=Parsed("organisation", _organisation),
    metavar="NAME",
    help="Name the clients' organisation, as their O.",
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
    organisation: str | None,
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
        clients = {Role.LEARNER: learners, Role.READER: readers, Role.ADMIN: admins}
        wanted = [*map(server, servers)]
        wanted += [client(role, name, organisation or "") for role, names in clients.items() for name in names]
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    files = ["ca", *(certificate.name for certificate in wanted)]
    if len(set(files)) < len(files):
        raise click.UsageError(f"two certificates can't have the same file name. names={', '.join(files)}")
    try:
        authority = Authority(folder, datetime.now(UTC))
        _say("made" if authority.is_new else "kept", folder / "ca.pem", authority.certificate.not_valid_after_utc)
        for item in wanted:
            present = None if renew else authority.find(item)
            end = (present or authority.make(item, days)).not_valid_after_utc
            _say("kept" if present else "made", folder / f"{item.name}.pem", end, str(item.identity or ""))
    except (ValueError, OSError) as error:
        raise click.ClickException(f"{error}. folder={folder}") from error
    click.echo("\nnext:")
    for line in _next(folder, wanted):
        click.echo(f"  {line}")


def _say(verb: str, file: Path, end: datetime, uri: str = "") -> None:
    click.echo(f"{verb}  {file}  until {end:%Y-%m-%d}  {uri}".rstrip())


def _next(folder: Path, wanted: Sequence[Wanted]) -> Iterator[str]:
    """Yields what to type, or to do, with these certificates."""
    ca, host = folder / "ca.pem", "HOST"
    for name, _, _, identity, _ in wanted:
        pair = f"--tls-cert {folder / name}.pem --tls-key {folder / name}.key"
        if identity is None:
            host = name
            yield f"skerry serve --listen 0.0.0.0:50051 {pair} --tls-client-ca {ca}"
        else:
            run = f"{identity.run} " if identity.run else ""
            is_learner = identity.role is Role.LEARNER
            command = f"learn {run}--learner-id {identity.name}" if is_learner else "runs list"
            yield f"skerry {command} --target {host}:50051 --tls-ca {ca} {pair}"
    if not wanted:
        yield f"skerry keys {folder} --server HOST --learner ID"
    yield f"give each machine {ca} and its own two files; keep {folder / 'ca.key'} here"
