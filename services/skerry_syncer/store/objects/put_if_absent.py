"""Puts an object that must not exist, and finds out whether it landed even if the store's answer does not tell.

A create that failed is read back, because its error decides nothing: the request may have landed and its answer been
lost; a retry below this layer may have met its own first attempt and say "exists"; one store says "exists" although
nothing landed. If our object is there, the create succeeded. If another writer's is there, it lost. If there is none,
the same bytes are put again, because the first request may still land, and equal objects do not conflict. If the name
can't be read, the outcome is unknown, and the caller hears nothing until it is known or 20 s are over.
"""

from __future__ import annotations

import contextlib
import random
from typing import Final

from skerry.net.retry import RetrySettings
from skerry.runtime.clock import Clock
from skerry.runtime.identifiers import Entropy
from skerry_syncer.store.errors import (
    ObjectExistsError,
    ObjectMissingError,
    OutcomeUnknownError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
    StoreURLError,
)
from skerry_syncer.store.objects.interface import Objects
from skerry_syncer.store.objects.local import TEMPORARY

# How long to look into an unknown outcome before the caller is told: longer than a restart of the object store, shorter
# than the timeout of a push that waits for it.
_PATIENCE_S: Final = 20.0
_PAUSES: Final = RetrySettings(attempt_count=None, first_wait_s=0.05, longest_wait_s=2.0)


async def create_or_read(objects: Objects, name: str, data: bytes, *, clock: Clock, entropy: Entropy) -> bytes:
    """Returns the bytes that `name` has from now on, durable: `data`, or what another writer put there first.

    `data` must differ from every other writer's, unless equal bytes mean the same thing from every writer.

    Raises:
        OutcomeUnknownError: the store did not say in time; `data` may have landed, or may land later.
        StoreFullError: no space; `data` is absent as far as the store says, and may land later.
    """
    started = clock.monotonic_s()
    attempt = 0
    while True:
        try:
            await objects.create(name, data)
            return data
        except StoreError as error:
            failure = error
        try:
            stored = await objects.get(name)
            # The caller will act on the object, even if another writer made it, so it must be durable.
            await objects.sync_parent(name)
            return stored
        except ObjectMissingError:
            if isinstance(failure, StoreFullError):
                raise failure from None
        except StoreError as error:
            failure = error
        if clock.monotonic_s() - started >= _PATIENCE_S:
            raise OutcomeUnknownError(f"store does not say whether a write landed. name={name}") from failure
        attempt += 1
        await clock.sleep(_PAUSES.wait_s(attempt, None, random.Random(entropy.hex_id())))


async def check_put_if_absent(objects: Objects, entropy: Entropy) -> None:
    """Returns if the store refuses to create a name twice, or is full. To be called before anything is written.

    On a store that creates it twice, two writers would both believe that they had written an entry of the log. An
    interrupted check leaves litter, which `skerry gc` deletes.

    Raises:
        StoreURLError: it creates a name twice.
        StoreUnavailableError: it does not say.
    """
    name = f"{TEMPORARY}/probe-{entropy.hex_id()}"
    try:
        for data in (b"first", b"second"):
            await objects.create(name, data)
    except (ObjectExistsError, StoreFullError):
        return
    finally:
        with contextlib.suppress(StoreError):
            await objects.delete([name])
    raise StoreURLError(
        "the store let one object be created twice, so acknowledged work would be lost. Use a server that honours "
        "`If-None-Match: *` (Google's: `x-goog-if-generation-match: 0`), and see that no proxy on the way drops the "
        "header"
    )


async def store_unix_s(objects: Objects, entropy: Entropy) -> float:
    """Returns the time by the object store's own clock: the one that dates its objects, so it tells their age.

    Raises:
        StoreUnavailableError: the store does not say.
        StoreFullError: no space for an object that dates it.
    """
    name = f"{TEMPORARY}/clock-{entropy.hex_id()}"
    try:
        with contextlib.suppress(ObjectExistsError):
            await objects.create(name, b"clock")
        async for info in objects.list(TEMPORARY):
            if info.name == name:
                return info.modified_at_unix_s
    finally:
        with contextlib.suppress(StoreError):
            await objects.delete([name])
    raise StoreUnavailableError(f"store does not list an object that it just took. name={name}")
