"""Leases that replicas share through the store. They are advice: late, lost or wrong ones do no harm.

Objects never change, so a learner's newest advice is a new object, `learners/<id>/<write id>`, and its writer deletes
the older ones. One listing finds the advice on all learners of a run, and only new objects are read.
"""

from __future__ import annotations

from typing import Final

from skerry.runtime.identifiers import Entropy
from skerry.runtime.logs import get_logger
from skerry_syncer.rounds.membership import Membership
from skerry_syncer.store.errors import ObjectMissingError
from skerry_syncer.store.log.state import RunState
from skerry_syncer.store.objects.interface import Objects

_LOG: Final = get_logger(__name__)
# Larger than any valid report. A larger object is not read.
MAX_ADVICE_BYTES: Final = 2**20
_FOLDER: Final = "learners"


class AdviceBoard:
    """The advice of one run, as one replica reads and writes it."""

    def __init__(self, objects: Objects, run_prefix: str, entropy: Entropy) -> None:
        """Takes the run's prefix, `runs/<run>/<uid>`."""
        self._objects = objects
        self._prefix = f"{run_prefix.rstrip('/')}/{_FOLDER}"
        self._entropy = entropy
        self._names: dict[str, set[str]] = {}  # by learner: the objects at the last listing or write

    async def publish(self, learner: str, advice: bytes) -> None:
        """Replaces the advice that other replicas read about the learner.

        Raises:
            StoreError: it could not be written; the older advice remains.
        """
        name = f"{self._prefix}/{learner}/{self._entropy.hex_id()}"
        await self._objects.write(name, advice)
        older = self._names.get(learner, set())
        self._names[learner] = {name}
        if older:
            await self._objects.delete(sorted(older))

    async def withdraw(self, learner: str) -> None:
        """Deletes the advice about a learner.

        Raises:
            StoreError: it could not be deleted.
        """
        known = self._names.pop(learner, set())
        if known:
            await self._objects.delete(sorted(known))

    async def read_new(self) -> tuple[tuple[str, bytes], ...]:
        """Returns (learner, advice) of every object that this replica has neither read nor written.

        Raises:
            StoreError: an object could not be read; the next call tries again.
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


async def share_leases(board: AdviceBoard, membership: Membership, state: RunState, now_s: float) -> bool:
    """Publishes the leases that were renewed here and reads those of other replicas; returns whether it read any.

    What is forgotten here is deleted there.

    Raises:
        StoreError: the store failed; the next call shares the newest leases.
    """
    for learner, advice in membership.unpublished():
        await board.publish(learner, advice)
    for learner in membership.forget_absent(state, now_s):
        await board.withdraw(learner)
    heard = await board.read_new()
    for learner, advice in heard:
        try:
            membership.hear(learner, advice, now_s)
        except ValueError as error:
            _LOG.warning("advice is not readable", learner=learner, cause=str(error))
    return bool(heard)
