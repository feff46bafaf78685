"""Versions that all ranks of an island download, each the range that it keeps: no rank has the whole of one.

The leader asks for the plan and cuts the fragment where all objects of the plan and the leaves of its digest are cut.
Each rank fetches the objects of its range over connections of its own, and subtracts them from its range of the version
before. Then it tells the leader the digests of its leaves, which together must make that of the version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import closing
from functools import partial
from itertools import pairwise
from typing import Any, Final, TypeAlias

import torch

from skerry.algorithm.rebase import FlatArray
from skerry.errors import SkerryError, StopExchangingError
from skerry.exchange.adopt import Pulled, check_digest
from skerry.exchange.pull import pull_newest, pull_plan, pull_span
from skerry.exchange.session import Calls, Reader
from skerry.ranks.calls import CountBytes, RankCalls
from skerry.ranks.ranges import plan_bounds
from skerry.ranks.spread import Spread
from skerry.runtime.logs import get_logger
from skerry.runtime.workers import ThreadWorkers
from skerry.stats import Tally
from skerry.v1 import exchange_pb2
from skerry.wire import FragmentLayout, TensorSpec
from skerry.wire.digests import LEAF_NUMEL, tree_root

_log = get_logger(__name__)
_WORKER_COUNT: Final = 2
# Versions that the first rank downloads for all after a rank has failed: one without a way out fails each time.
_PAUSE: Final = 20

_Fetch: TypeAlias = Callable[[Reader], Coroutine[Any, Any, list[str]]]


class IslandDownloads:
    """One rank's part in the downloads of its island."""

    def __init__(self, calls: RankCalls, specs: dict[str, TensorSpec]) -> None:
        """Every rank of the island makes one, at the same time."""
        self.shelf = calls.shelf
        self._calls = calls
        self._specs = specs
        self._own: dict[int, _Fetch] = {}  # the leader's, by key of the version
        self._pause = 0
        self.shelf.tasks["pull"] = self._pull

    # At the leader.

    async def pull(self, session: Reader, layout: FragmentLayout, *, version: int, weights: FlatArray | None) -> Pulled:
        """Does as `pull_newest`, which does it where ranks can't: for a snapshot, or a plan of few objects."""
        self._pause = max(0, self._pause - 1)
        if isinstance(weights, Spread) and layout.numel > LEAF_NUMEL and not self._pause:
            try:
                async with session.transfers:
                    pulled = await self._pulled(session, layout, version, weights)
            except StopExchangingError:
                raise
            except SkerryError as error:
                self._pause = _PAUSE
                _log.info("the first rank downloads what a rank could not", fragment=layout.name, because=str(error))
            else:
                if pulled is not None:
                    return pulled
        return await pull_newest(session, layout, version=version, weights=weights)

    async def _pulled(self, session: Reader, layout: FragmentLayout, version: int, start: Spread) -> Pulled | None:
        plan = await pull_plan(session, layout, version)
        if plan.from_version != version or not plan.objects:
            return None
        bounds = plan_bounds(layout, plan, self.shelf.island.size)
        if layout.numel in {stop - first for first, stop in pairwise(bounds)}:
            return None
        spread = Spread(self.shelf, layout.numel, bounds)
        begin = partial(
            self.shelf.do,
            "pull",
            key=spread.key,
            base=self.shelf.described(start),
            bounds=bounds,
            fragment=[layout.name, *(tensor.name for tensor in layout.tensors)],
            run=[session.run, session.run_uid, session.position],
            plan=plan.SerializeToString().hex(),
        )
        await session.workers.run(begin)
        others = (self._calls.follow(rank, spread.key, session.tally.received) for rank in range(1, len(bounds) - 1))
        # All are waited for, since what a rank keeps of a version is forgotten only after it came.
        answers = await asyncio.gather(self._own.pop(spread.key)(session), *others, return_exceptions=True)
        leaves: list[bytes] = []
        try:
            for answer in answers:
                if isinstance(answer, BaseException):
                    raise answer
                leaves += map(bytes.fromhex, answer)
        finally:
            del answers, answer  # an error refers to this frame, and so to what ranks keep
        check_digest(plan, tree_root(layout.numel, leaves))
        await session.workers.run(self.shelf.even_out, spread)
        return Pulled(plan.target.version, plan.target.digest, spread, plan.position)

    # At every rank.

    def _pull(
        self,
        *,
        key: int,
        base: dict[str, Any],
        bounds: list[int],
        fragment: list[str],
        run: tuple[str, str, int],
        plan: str,
    ) -> None:
        """Begins to download this rank's range; at the leader, makes ready to."""
        rank = self.shelf.island.rank
        start = self.shelf.ranged(**base, bounds=bounds)
        name, *tensors = fragment
        layout = FragmentLayout(name, tuple(self._specs[one] for one in tensors))
        parsed = exchange_pb2.PullPlan.FromString(bytes.fromhex(plan))

        async def fetch(reader: Reader) -> list[str]:
            span = bounds[rank], bounds[rank + 1]
            values, leaves = await pull_span(reader, layout, parsed, start.numpy(), span)
            self.shelf.things[key] = torch.from_numpy(values)
            return [leaf.hex() for leaf in leaves]

        if rank == 0:
            self._own[key] = fetch
        else:
            self._calls.begin(key, partial(_fetched, fetch, run))


async def _fetched(fetch: _Fetch, run: tuple[str, str, int], calls: Calls, count_bytes: CountBytes) -> list[str]:
    """Returns what `fetch` does, at a rank that has only the run's name, unique id and a position."""
    with closing(ThreadWorkers(_WORKER_COUNT)) as workers:
        reader = Reader(calls, workers, run[0])
        reader.run_uid, reader.position = run[1:]
        reader.tally = _Reported(count_bytes)
        return await fetch(reader)


class _Reported(Tally):
    """Has what is received reported."""

    def __init__(self, count_bytes: CountBytes) -> None:
        super().__init__()
        self._count_bytes = count_bytes

    def received(self, size_bytes: int) -> None:
        """Reports bytes of updates and snapshots that came down."""
        self._count_bytes(size_bytes)
