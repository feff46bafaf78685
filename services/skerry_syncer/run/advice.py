"""Leases that replicas share through the store. They are advice: late, lost or wrong ones do no harm.

Objects never change, so a learner's newest advice is a new object, `learners/<id>/<write id>`, and its writer deletes
the older ones. One listing finds the advice on all learners of a run, and only new objects are read.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from skerry.runtime.logs import get_logger
from skerry_syncer.rounds.leases import Leases
from skerry_syncer.store.errors import ObjectMissingError
from skerry_syncer.store.log.run_log import RunLog

_LOG: Final = get_logger(__name__)


class AdviceBoard:
    """The advice of one run, as one replica reads and writes it."""

    def __init__(self, log: RunLog) -> None:
        """Takes the log of the run."""
        self._log = log
        self._folder = f"{log.prefix}/learners"
        self._known: set[str] = set()  # the objects that this replica has read or written

    async def share(self, leases: Leases, now_s: float) -> bool:
        """Publishes the leases that were renewed here and reads those of other replicas; returns whether it read any.

        Raises:
            StoreError: the store failed; the next call shares the newest leases.
        """
        for learner, advice in leases.unpublished():
            await self._publish(f"{self._folder}/{learner}/", advice)
        listed = {info.name async for info in self._log.objects.list(self._folder)}
        self._known &= listed
        news = sorted(listed - self._known)
        for name in news:
            with suppress(ObjectMissingError):  # replaced since it was listed
                advice = await self._log.objects.get(name)
                self._known.add(name)
                try:
                    leases.hear(name.split("/")[-2], advice, now_s)
                except ValueError as error:
                    _LOG.warning("advice is not readable", name=name, cause=str(error))
        return bool(news)

    async def _publish(self, folder: str, advice: bytes) -> None:
        name = folder + self._log.entropy.hex_id()
        await self._log.objects.write(name, advice)
        older = sorted(known for known in self._known if known.startswith(folder))
        self._known = self._known.difference(older) | {name}
        if older:
            await self._log.objects.delete(older)
