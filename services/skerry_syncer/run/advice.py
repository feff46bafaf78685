"""Leases that replicas share through the store. They are advice: late, lost or wrong ones do no harm.

Objects never change, so a learner's newest advice is a new object, `learners/<id>/<write id>`, and its writer deletes
the older ones. One listing finds the advice on all learners of a run, and only new objects are read.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from skerry.runtime.logs import get_logger
from skerry_syncer.rounds.leases import Leases
from skerry_syncer.store.errors import ObjectMissingError
from skerry_syncer.store.log.run_log import RunLog

_LOG: Final = get_logger(__name__)
# Larger than any valid report. A larger object is not read.
_MAX_ADVICE_BYTES: Final = 2**20


class AdviceBoard:
    """The advice of one run, as one replica reads and writes it."""

    def __init__(self, log: RunLog) -> None:
        """Takes the log of the run."""
        self._log = log
        self._prefix = f"{log.prefix}/learners"
        self._names: dict[str, set[str]] = {}  # by learner: the objects at the last listing or write

    async def share(self, leases: Leases, now_s: float) -> bool:
        """Publishes the leases that were renewed here and reads those of other replicas; returns whether it read any.

        Raises:
            StoreError: the store failed; the next call shares the newest leases.
        """
        for learner, advice in leases.unpublished():
            await self._publish(learner, advice)
        has_news = False
        async for learner, advice in self._news():
            has_news = True
            try:
                leases.hear(learner, advice, now_s)
            except ValueError as error:
                _LOG.warning("advice is not readable", learner=learner, cause=str(error))
        return has_news

    async def _publish(self, learner: str, advice: bytes) -> None:
        name = f"{self._prefix}/{learner}/{self._log.entropy.hex_id()}"
        await self._log.objects.write(name, advice)
        older = self._names.get(learner, set())
        self._names[learner] = {name}
        if older:
            await self._log.objects.delete(sorted(older))

    async def _news(self) -> AsyncIterator[tuple[str, bytes]]:
        """Yields (learner, advice) of every object that this replica has neither read nor written."""
        names: dict[str, set[str]] = {}
        async for info in self._log.objects.list(self._prefix):
            learner, _, rest = info.name.removeprefix(f"{self._prefix}/").partition("/")
            if rest and info.size_bytes <= _MAX_ADVICE_BYTES:
                names.setdefault(learner, set()).add(info.name)
        self._names = {learner: listed & self._names.get(learner, set()) for learner, listed in names.items()}
        for learner, listed in sorted(names.items()):
            for name in sorted(listed - self._names[learner]):
                try:
                    advice = await self._log.objects.get(name)
                except ObjectMissingError:  # replaced since it was listed
                    continue
                self._names[learner].add(name)
                yield learner, advice
