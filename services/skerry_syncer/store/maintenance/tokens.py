"""`skerry tokens`: makes, lists and revokes the tokens of a store."""

from __future__ import annotations

import asyncio
import re
from typing import Final

import click

from skerry.runtime.clock import SystemClock
from skerry.runtime.identifiers import SystemEntropy
from skerry.runtime.options import Count, Number, Parsed
from skerry.wire.identity import LEAST_WEIGHT, MOST_WEIGHT, Identity, Role
from skerry_syncer.store.maintenance.log_lines import time_text
from skerry_syncer.store.maintenance.options import NAME, RUN, opened_store, store_option
from skerry_syncer.store.tokens import FOLDER, REVOKED, Token, create_token, read_token, revoke_token, token_digests

_SHORT: Final = 12  # digits of a digest that are shown
_DAY_S: Final = 86_400
_WEIGHT_HELP: Final = "How many usual learners a learner may count for in a round.  [default: by policy, 2]"


def _id(text: str) -> str:
    if re.fullmatch("[0-9a-f]{1,64}", text) is None:
        raise ValueError(f"not the id of a token; `skerry tokens list` shows them. id={text[:80]!r}")
    return text


@click.group(
    epilog="""\b
Examples:
  skerry tokens create --store s3://bucket/skerry --role learner --name us-east --run gpt > us-east.token
  skerry tokens list --store s3://bucket/skerry
  skerry tokens revoke --store s3://bucket/skerry 3f0c5e1d2a77
"""
)
def tokens() -> None:
    """Make, list and revoke tokens, by which clients of `skerry serve --tokens` say who they are.

    A client sends its token over TLS: see --token-file of `skerry learn` and `skerry runs`.
    """


@tokens.command(
    epilog="""\b
Examples:
  skerry tokens create --store s3://bucket/skerry --role learner --name us-east > us-east.token
  skerry tokens create --store s3://bucket/skerry --role learner --name big --weight 8 > big.token
  skerry tokens create --store file:///var/lib/skerry --role reader --name grafana --days 365
"""
)
@store_option
@click.option("--role", required=True, type=click.Choice([role.value for role in Role]), help="What the client may do.")
@click.option("--name", required=True, type=NAME, help="Name of the client; of a learner its id.")
@click.option("--run", "run_name", type=RUN, help="The only run that a learner may use.  [default: any]")
@click.option("--weight", type=Number(LEAST_WEIGHT, MOST_WEIGHT), help=_WEIGHT_HELP)
@click.option("--days", type=Count(1, 3650), default=90, show_default=True, help="How long it is valid.")
def create(*, store_url: str, role: str, name: str, run_name: str | None, weight: float | None, days: int) -> None:
    """Make a token and print it. It is shown only now: the store keeps a hash of it."""
    try:
        identity = Identity.parse(str(Identity(Role(role), name, run_name or "", weight)))
    except ValueError as error:
        raise click.UsageError(f"{error}. Only a learner may have a --run and a --weight.") from error
    now = SystemClock().unix_s()

    async def make() -> str:
        async with opened_store(store_url, writes=True) as (store, _):
            return await create_token(
                store.objects, identity, SystemEntropy(), now_unix_s=now, lifetime_s=days * _DAY_S
            )

    click.echo(asyncio.run(make()))
    click.echo(f"for {identity}, until {time_text(now + days * _DAY_S)} UTC; syncers know it within 10 s", err=True)


@tokens.command(
    "list",
    epilog="""\b
Examples:
  skerry tokens list --store s3://bucket/skerry
  skerry tokens list --store s3://bucket/skerry --all      also those that were revoked
""",
)
@store_option
@click.option("--all", "is_all", is_flag=True, help="Also tokens that were revoked, and when.")
def list_(*, store_url: str, is_all: bool) -> None:
    """List tokens: the id by which one is revoked, whose it is, when it was made and when it ends, in UTC.

    It does not say who made or revoked a token: anybody who can write to the store can.
    """
    now = SystemClock().unix_s()
    for token in asyncio.run(_read_all(store_url, is_all=is_all)):
        state = "valid until" if now < token.expires_at_unix_s else "expired"
        made, end = time_text(token.created_at_unix_s), time_text(token.expires_at_unix_s)
        if token.revoked_at_unix_s is not None:
            state, end = "revoked", time_text(token.revoked_at_unix_s)
        click.echo(f"{token.digest[:_SHORT]}  {token.identity}  made {made}  {state} {end}")


@tokens.command(epilog="\b\nExample:\n  skerry tokens revoke --store s3://bucket/skerry 3f0c5e1d2a77")
@store_option
@click.argument("ids", metavar="ID...", nargs=-1, required=True, type=Parsed("id", _id))
def revoke(*, store_url: str, ids: tuple[str, ...]) -> None:
    """Take tokens back. Within 10 s every syncer refuses them, and ends the calls that were made with them.

    The store keeps that they were there and when they were revoked: see `skerry tokens list --all`.
    """
    now = SystemClock().unix_s()

    async def take_back() -> None:
        async with opened_store(store_url) as (store, _):
            known = [digest async for digest in token_digests(store.objects)]
            chosen = {one: [digest for digest in known if digest.startswith(one)] for one in ids}
            unclear = [one for one, found in chosen.items() if len(found) != 1]
            if unclear:
                raise click.UsageError(f"not the id of one token; `skerry tokens list` shows them. ids={unclear}")
            for found in chosen.values():
                await revoke_token(store.objects, found[0], now_unix_s=now)

    asyncio.run(take_back())
    click.echo(f"revoked {len(ids)}; syncers refuse them within 10 s")


async def _read_all(store_url: str, *, is_all: bool) -> list[Token]:
    found: dict[str, Token] = {}
    async with opened_store(store_url) as (store, _):
        for folder in (REVOKED, FOLDER) if is_all else (FOLDER,):
            async for digest in token_digests(store.objects, folder):
                found[digest] = await read_token(store.objects, digest, folder)
    return sorted(found.values(), key=lambda one: (str(one.identity), one.created_at_unix_s))
