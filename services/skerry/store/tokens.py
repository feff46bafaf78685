"""Bearer tokens of a store: 256 random bits each, of which only the SHA-256 is kept.

    tokens/<SHA-256 of the token, in hex>      whose it is and until when, as JSON

A slow hash, as for passwords, would protect no better: nobody can try 2^256 tokens. Deleting the object revokes the
token. Anybody who can write to the store can make tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from typing import Final, NamedTuple

import msgspec

from skerry.runtime.identifiers import Entropy
from skerry.store.log.entries import FORMAT, canonical_json, check_format
from skerry.store.objects.interface import Objects, read_json
from skerry.wire.identity import Identity

FOLDER: Final = "tokens"
_PREFIX: Final = "skerry_"  # lets scanners for secrets find one that was published by mistake


class _Stored(msgspec.Struct):
    format: int
    identity: str
    created_at_unix_s: float
    expires_at_unix_s: float


class Token(NamedTuple):
    """What the store has of a token."""

    digest: str
    identity: Identity
    created_at_unix_s: float
    expires_at_unix_s: float  # by the clocks of syncers


def token_digest(token: str) -> str:
    """Returns what the store knows a token by."""
    return hashlib.sha256(token.encode()).hexdigest()


async def create_token(
    objects: Objects, identity: Identity, entropy: Entropy, *, now_unix_s: float, lifetime_s: float
) -> str:
    """Returns a new token; it is kept nowhere."""
    token = f"{_PREFIX}{entropy.hex_id()}{entropy.hex_id()}"
    stored = _Stored(FORMAT, str(identity), now_unix_s, now_unix_s + lifetime_s)
    await objects.create(f"{FOLDER}/{token_digest(token)}", canonical_json(msgspec.structs.asdict(stored)))
    return token


async def read_token(objects: Objects, digest: str) -> Token:
    """Returns a token.

    Raises:
        ObjectMissingError: it was revoked.
        NewerFormatError, ValueError: it can't be read.
    """
    stored = read_json(await objects.get(f"{FOLDER}/{digest}"), _Stored)
    check_format(stored.format, FORMAT)
    return Token(digest, Identity.parse(stored.identity), stored.created_at_unix_s, stored.expires_at_unix_s)


async def token_digests(objects: Objects) -> AsyncIterator[str]:
    """Yields the digest of every token that is not revoked."""
    async for info in objects.list(FOLDER):
        yield info.name.removeprefix(f"{FOLDER}/")


async def revoke_token(objects: Objects, digest: str) -> None:
    """Takes a token back; syncers refuse it within 10 s."""
    await objects.delete([f"{FOLDER}/{digest}"])
