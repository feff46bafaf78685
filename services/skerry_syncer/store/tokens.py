"""Bearer tokens of a store: 256 random bits each, of which only the SHA-256 is kept.

    tokens/<SHA-256 of the token, in hex>              whose it is and until when, as JSON
    revoked-tokens/<SHA-256 of the token, in hex>      the same of one that was revoked, and when

A slow hash, as for passwords, would protect no better, because 2^256 tokens cannot be tried. Deleting the object
revokes the token. Anybody who can write to the store can make tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec

from skerry.runtime.identifiers import Entropy
from skerry.wire.identity import Identity
from skerry_syncer.store.errors import NewerFormatError, ObjectExistsError, ObjectMissingError
from skerry_syncer.store.log.entries import FORMAT, canonical_json, check_format
from skerry_syncer.store.objects.interface import Objects, read_json

FOLDER: Final = "tokens"
REVOKED: Final = "revoked-tokens"
_PREFIX: Final = "skerry_"  # lets scanners for secrets find one that was published by mistake


class _Stored(msgspec.Struct, omit_defaults=True):
    format: int
    identity: str
    created_at_unix_s: float
    expires_at_unix_s: float
    revoked_at_unix_s: float | None = None


class Token(NamedTuple):
    """What the store has of a token."""

    digest: str
    identity: Identity
    created_at_unix_s: float
    expires_at_unix_s: float  # by the clocks of syncers
    revoked_at_unix_s: float | None = None


def token_digest(token: str) -> str:
    """Returns what the store knows a token by."""
    return hashlib.sha256(token.encode()).hexdigest()


async def create_token(
    objects: Objects, identity: Identity, entropy: Entropy, *, now_unix_s: float, lifetime_s: float
) -> str:
    """Returns a new token; it is kept nowhere."""
    token = f"{_PREFIX}{entropy.hex_id()}{entropy.hex_id()}"
    stored = _Stored(FORMAT, str(identity), now_unix_s, now_unix_s + lifetime_s)
    await objects.create(f"{FOLDER}/{token_digest(token)}", canonical_json(msgspec.to_builtins(stored)))
    return token


async def read_token(objects: Objects, digest: str, folder: str = FOLDER) -> Token:
    """Returns a token, or from the folder `REVOKED` what is left of one.

    Raises:
        ObjectMissingError: it was revoked.
        NewerFormatError, ValueError: it can't be read.
    """
    stored = read_json(await objects.get(f"{folder}/{digest}"), _Stored)
    check_format(stored.format, FORMAT)
    identity = Identity.parse(stored.identity)
    return Token(digest, identity, stored.created_at_unix_s, stored.expires_at_unix_s, stored.revoked_at_unix_s)


async def token_digests(objects: Objects, folder: str = FOLDER) -> AsyncIterator[str]:
    """Yields the digest of every token that is not revoked, or from the folder `REVOKED` of every one that was."""
    async for info in objects.list(folder):
        yield info.name.removeprefix(f"{folder}/")


async def revoke_token(objects: Objects, digest: str, *, now_unix_s: float) -> None:
    """Takes a token back and keeps what it was; syncers refuse it within 10 s.

    Raises:
        StoreError: the record could not be stored, as on a full disk; the token is deleted even then, if that is
            possible.
    """
    try:
        # A token that can't be read was never accepted. A record that is there is of an attempt that was cut off.
        with suppress(ObjectMissingError, NewerFormatError, ValueError, ObjectExistsError):
            token = await read_token(objects, digest)
            stored = _Stored(FORMAT, str(token.identity), *token[2:4], revoked_at_unix_s=now_unix_s)
            await objects.create(f"{REVOKED}/{digest}", canonical_json(msgspec.to_builtins(stored)))
    finally:
        await objects.delete([f"{FOLDER}/{digest}"])
