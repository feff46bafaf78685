"""Digests of frozen parameters of which each rank of an island holds a part.

A digest is of the whole tensor in row-major order, so it does not depend on who holds which part. The leader gets the
tensors one after another, in pieces of a bounded size, and holds one piece at a time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from skerry.errors import StopExchangingError
from skerry.exchange.untrained import may_differ
from skerry.model.torch import untrained as torch_untrained
from skerry.model.torch.shards import Region, first_holders, local_part, region_of
from skerry.ranks.island import Island
from skerry.wire.untrained import values_digest


class _Part(NamedTuple):
    region: Region
    digest: bytes  # of this part alone


def frozen_digests(
    island: Island, frozen: Mapping[str, torch.Tensor], *, allow_other_frozen: bool | Collection[str]
) -> dict[str, bytes]:
    """Returns the digests of DTensors to the leader, and nothing to other ranks; every rank of the island must ask.

    A tensor that the island's ranks do not hold completely has none.

    Raises:
        StopExchangingError: RANKS_DIFFER: replicas hold other values, and may not.
    """
    held = {name: local_part(tensor) for name, tensor in frozen.items()}
    own = {
        name: _Part(region_of(name, frozen[name]), values_digest(torch_untrained.pieces(part)))
        for name, part in held.items()
    }
    parts: list[Mapping[str, _Part]] = island.all_gather(own)
    digests = {}
    for name, tensor in frozen.items():
        regions = [part[name].region for part in parts]
        firsts = first_holders(regions)
        if not may_differ(name, allowed=allow_other_frozen) and any(
            part[name].digest != parts[first][name].digest for part, first in zip(parts, firsts, strict=True)
        ):
            raise StopExchangingError(
                "RANKS_DIFFER",
                "the frozen values of ranks that hold the same part of a frozen parameter must be the same. "
                f"parameter={name}",
            )
        holders = {first: regions[first] for first in firsts}
        if sum(region.numel for region in holders.values()) == tensor.numel():
            pieces = _pieces(island, held[name], tensor.shape, holders)
            if island.is_leader:
                digests[name] = values_digest(pieces)
            else:
                sum(1 for _ in pieces)
    return digests


def _pieces(
    island: Island, held: torch.Tensor, shape: Sequence[int], holders: Mapping[int, Region]
) -> Iterator[memoryview]:
    """Yields the bytes of a tensor at the leader, in row-major order, and sends this rank's at another one.

    `holders` has the ranks that send, with their regions; this rank's is `held`.
    """
    limit = max(1, torch_untrained.PIECE_BYTES // held.element_size())
    for box in _boxes(shape, limit):
        whole = torch.empty(box.shape if island.is_leader else (0,), dtype=held.dtype, device="cpu")
        for rank, region in holders.items():
            common = _common(box, region)
            if not common.numel or island.rank not in (0, rank):
                continue
            if rank == island.rank:
                piece = held[_within(common, region)].contiguous().cpu()
            else:
                piece = torch.empty(common.shape, dtype=held.dtype, device="cpu")
                island.receive(torch_untrained.as_bytes(piece), rank)
            if island.is_leader:
                whole[_within(common, box)] = piece
            else:
                island.send(torch_untrained.as_bytes(piece), 0)
        yield torch_untrained.as_bytes(whole).numpy().data


def _boxes(shape: Sequence[int], limit: int) -> Iterator[Region]:
    """Yields boxes of at most `limit` elements that follow each other in row-major order and fill the shape."""
    axis = 0
    while math.prod(shape[axis + 1 :]) > limit:
        axis += 1
    inner = tuple(shape[axis + 1 :])
    size = limit // math.prod(inner)
    for index in np.ndindex(*shape[:axis]):
        for first in range(0, shape[axis], size):
            yield Region(
                (*index, first, *(0 for _ in inner)), (*(1 for _ in index), min(size, shape[axis] - first), *inner)
            )


def _common(one: Region, other: Region) -> Region:
    first = tuple(map(max, one.first, other.first))
    stops = (min(a.stop, b.stop) for a, b in zip(one.slices, other.slices, strict=True))
    return Region(first, tuple(max(0, stop - start) for start, stop in zip(first, stops, strict=True)))


def _within(inner: Region, outer: Region) -> tuple[slice, ...]:
    """Returns where a box lies in another one."""
    return inner._replace(first=tuple(a - b for a, b in zip(inner.first, outer.first, strict=True))).slices
