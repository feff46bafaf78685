"""Leases told from replica to replica through the store: advice, which may be late, lost or wrong without harm.

Objects never change, so a learner's newest advice is a new object, `learners/<id>/<write id>`, and who writes it
deletes the older ones. One listing then tells a replica of all learners of a run, and it reads only what is new.
"""

from __future__ import annotations

from typing import Final

import structlog

from skerry.runtime.identifiers import Entropy
from skerry.store.errors import ObjectMissingError
from skerry.store.objects.interface import Objects
from skerry.syncer.membership import Membership

_LOG: Final = structlog.get_logger(__name__)
# What one learner's report may take; more is not read.
MAX_ADVICE_BYTES: Final = 2**20
_FOLDER: Final = "learners"


class AdviceBoard:
    """The advice of one run, as one replica reads and writes it."""

    def __init__(self, objects: Objects, run_prefix: str, entropy: Entropy) -> None:
        """Takes the run's prefix, `runs/<run>/<uid>`."""
        self._objects = objects
        self._prefix = f"{run_prefix.rstrip('/')}/{_FOLDER}"
        self._entropy = entropy
        self._names: dict[str, set[str]] = {}  # by learner: objects that are there, as far as seen

    async def publish(self, learner: str, advice: bytes) -> None:
        """Replaces what others read of the learner.

        Raises:
            StoreError: it could not be written; the older advice stands.
        """
        name = f"{self._prefix}/{learner}/{self._entropy.hex_id()}"
        await self._objects.write(name, advice)
        older = self._names.get(learner, set())
        self._names[learner] = {name}
        if older:
            await self._objects.delete(sorted(older))

    async def read_new(self) -> tuple[tuple[str, bytes], ...]:
        """Returns (learner, advice) of every object that was not there, or not read, the last time.

        Raises:
            StoreError: it could not be read; the next call tries again.
        """
        names: dict[str, set[str]] = {}
        async for found in self._objects.list(self._prefix):
            learner, _, rest = found.name.removeprefix(f"{self._prefix}/").partition("/")
            if rest and found.size_bytes <= MAX_ADVICE_BYTES:
                names.setdefault(learner, set()).add(found.name)
        unread = [
            (learner, name)
            for learner, all_names in sorted(names.items())
            for name in sorted(all_names - self._names.get(learner, set()))
        ]
        advice = []
        for learner, name in unread:
            try:
                advice.append((learner, await self._objects.get(name)))
            except ObjectMissingError:  # replaced since it was listed
                names[learner].discard(name)
        self._names = names
        return tuple(advice)


async def exchange_leases(board: AdviceBoard, membership: Membership, now_s: float) -> bool:
    """Writes what was renewed here, takes in what others wrote, and returns whether there was any of that.

    Raises:
        StoreError: the store failed; what was not exchanged is next time, or is out of date by then.
    """
    for learner, advice in membership.unpublished():
        await board.publish(learner, advice)
    heard = await board.read_new()
    for learner, advice in heard:
        try:
            membership.hear(learner, advice, now_s)
        except (ValueError, KeyError, TypeError) as error:
            _LOG.warning("advice is not readable", learner=learner, cause=str(error))
    return bool(heard)
