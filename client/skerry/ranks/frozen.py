"""Frozen parameters of which each rank of an island holds all, or a part."""

from __future__ import annotations

from collections.abc import Collection

from skerry.errors import StopExchangingError
from skerry.exchange.untrained import may_differ
from skerry.model.torch.parameters import TorchParameters
from skerry.model.torch.shards import first_holders
from skerry.ranks.island import Island
from skerry.wire.untrained import UntrainedTensor


def untrained_of(
    island: Island, own: TorchParameters, *, allow_other_frozen: bool | Collection[str]
) -> tuple[UntrainedTensor, ...]:
    """Returns what the island has besides the parameters that are trained; every rank asks at the same time.

    Raises:
        StopExchangingError: RANKS_DIFFER: replicas hold other values, and may not.
    """
    ranks = island.all_gather(own.frozen_parts())
    held = {}
    for name in ranks[0].keys() & ranks[-1].keys():
        parts = [rank[name] for rank in ranks if name in rank]
        firsts = first_holders([part.region for part in parts])
        if any(part != parts[first] for part, first in zip(parts, firsts, strict=True)) and not may_differ(
            name, allowed=allow_other_frozen
        ):
            raise StopExchangingError(
                "RANKS_DIFFER",
                "the frozen values of ranks that hold the same part of a frozen parameter must be the same. "
                f"parameter={name}",
            )
        held[name] = [parts[first] for first in set(firsts)]
    return own.untrained(held)
