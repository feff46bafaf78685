"""The weights of a model that several processes hold, as the exchange at the leader reads and writes them.

Either every rank holds the whole model (DistributedDataParallel), or each holds a box of each tensor (`fully_shard`,
tensor parallelism, or both). Several ranks may hold the same box: they are replicas of that tensor. What the exchange
changes reaches all ranks at the same step boundary, by the leader's order. It sends whole fragments to all with the
order; of shards each rank has got its share before, beside the training. For a delta, each rank copies its share, and
all encode the delta together, also beside the training.

A rank's share of a fragment is its boxes of the fragment's tensors, one after another, as one flat vector.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from skerry.algorithm.rebase import FlatArray
from skerry.model.interface import UNLIMITED, EncodeFrames, EncodeTogether, PullTogether, Work
from skerry.model.torch.parameters import TorchParameters
from skerry.model.torch.shards import Box, Region, first_holders
from skerry.net.transport import Transport
from skerry.ranks.calls import RankCalls
from skerry.ranks.deltas import IslandDeltas
from skerry.ranks.downloads import IslandDownloads
from skerry.ranks.frozen import frozen_digests
from skerry.ranks.island import Call, Island, Word
from skerry.ranks.spread import Shelf, Spread
from skerry.wire import FragmentLayout, TensorSpec
from skerry.wire.frames import encode_frames
from skerry.wire.untrained import UntrainedTensor

# Columns of the table that a fingerprint sums up: a prime, so that no layout of a tensor has the same period.
_FINGERPRINT_COLUMNS: Final = 4093
_FINGERPRINT_BYTES: Final = 16
# Where no rank holds the model, so many fragments move at a time: one is adopted while the next one is pulled. Of some
# the leader has whole vectors.
_MOVING_LIMIT: Final = 2


class IslandParameters:
    """The parameters of one rank, `own`; at the leader, as `Parameters`, those of the island.

    Raises:
        ValueError: the ranks together do not hold every tensor exactly once, replicas aside.
        StopExchangingError: RANKS_DIFFER: replicas have other frozen values, of parameters not allowed to differ.
    """

    def __init__(
        self,
        island: Island,
        own: TorchParameters,
        open_transport: Callable[[], Transport],
        *,
        allow_other_frozen: bool | Collection[str],
    ) -> None:
        """Every rank makes one, at the same time; `open_transport`, called on an event loop, reaches the syncer."""
        self._island = island
        self._own = own
        self.tensors = own.tensors
        self.dtypes = own.dtypes
        self.replaced = own.replaced
        self.enter_worker = own.enter_worker
        self.synchronize = own.synchronize
        self._specs = {tensor.name: tensor for tensor in own.tensors}
        self._regions: list[Mapping[str, Region]] = island.all_gather(own.regions)
        # Of each tensor, for each rank, the first rank that holds the same part.
        self._holders = {name: first_holders([regions[name] for regions in self._regions]) for name in self._specs}
        # The different ways in which tensors have replicas: without tensor parallelism, at most one.
        self._replications = sorted(set(self._holders.values()) - {tuple(range(island.size))})
        self._is_whole = all(
            regions[name].shape == spec.shape for regions in self._regions for name, spec in self._specs.items()
        )
        self._sums: list[list[torch.Tensor]] = [[] for _ in self._replications]
        self._failure: BaseException | None = None
        self._check_cover()
        self._frozen_digests = frozen_digests(island, own.frozen_shards, allow_other_frozen=allow_other_frozen)
        self.shelf = None if self._is_whole else Shelf(island, self._specs, self._boxes, self._share_on_host)
        self._calls = None if self.shelf is None else RankCalls(self.shelf, open_transport)
        self._deltas = None if self._calls is None else IslandDeltas(self._calls, self._specs)
        self._downloads = None if self._calls is None else IslandDownloads(self._calls, self._specs)
        self.moving_limit = UNLIMITED if self._is_whole else _MOVING_LIMIT

    def _check_cover(self) -> None:
        for name, spec in self._specs.items():
            held = sum(region.numel for region in {regions[name] for regions in self._regions})
            if held != spec.numel:
                raise ValueError(
                    "the ranks do not hold every element of a parameter once: the learner's process_group must have "
                    f"all ranks of the model's mesh. parameter={name}, numel={spec.numel}, held={held}"
                )

    # What the exchange asks for, at the leader.

    def untrained(self) -> tuple[UntrainedTensor, ...]:
        """Returns frozen parameters and persistent buffers; the first call reads what is whole here of the former."""
        digests = self._frozen_digests
        return tuple(replace(one, digest=digests.get(one.name, one.digest)) for one in self._own.untrained())

    @property
    def encode(self) -> EncodeFrames:
        """The encoder for flat arrays, which are on the host unless every rank holds the whole model."""
        return self._own.encode if self._is_whole else encode_frames

    @property
    def encode_together(self) -> EncodeTogether | None:
        """How all ranks encode a delta, each some of its parts, where no rank holds the whole model."""
        return None if self._deltas is None else self._deltas.encode

    @property
    def pull_together(self) -> PullTogether | None:
        """How all ranks download a version, each its range, where no rank holds the whole model."""
        return None if self._downloads is None else self._downloads.pull

    def is_float32(self, layout: FragmentLayout) -> bool:
        """Whether every tensor of the fragment is float32."""
        return self._own.is_float32(layout)

    def buffer(self, layout: FragmentLayout) -> FlatArray:
        """Returns a vector for a snapshot, with its memory already allocated where it is not spread over the ranks."""
        return self._own.buffer(layout) if self.shelf is None else Spread(self.shelf, layout.numel)

    def snapshot(self, layout: FragmentLayout, out: FlatArray) -> Work:
        """Returns a function that copies the weights to `out`."""
        if self._is_whole:
            return self._own.snapshot(layout, out)

        def work() -> None:
            out.bounds, out.layout = [], layout
            self._order("snapshot", layout, key=out.key)
            self._copy_share(layout, out.key)

        return lambda: self._guarded(work)

    def add(self, layout: FragmentLayout, shift: FlatArray) -> Work:
        """Returns a function that adds to the weights on all ranks."""
        return self._change("add", layout, shift)

    def load(self, layout: FragmentLayout, values: FlatArray) -> Work:
        """Returns a function that overwrites the weights on all ranks."""
        return self._change("load", layout, values)

    def is_finite(self, layout: FragmentLayout) -> bool:
        """Whether every weight is a finite number."""
        if self._is_whole:
            return self._own.is_finite(layout)
        self._order("is_finite", layout)
        own = self._own.is_finite(layout)
        return all(word.token_count for word in self._island.gather(Word(Call.STEP, int(own))))

    def from_host(self, values: NDArray[np.float32]) -> FlatArray:
        """Returns the values where flat arrays are."""
        return self._own.from_host(values) if self._is_whole else values

    def to_host(self, values: FlatArray) -> NDArray[np.float32]:
        """Returns the values on the host."""
        return self._own.to_host(values) if self._is_whole else values

    def keep(self, values: FlatArray) -> FlatArray:
        """Returns the values, spread over the ranks where no rank holds the whole model."""
        return values if self.shelf is None or isinstance(values, Spread) else self.shelf.keep(values)

    def close(self) -> None:
        """Ends what the ranks do for the leader, and closes this one's connections to the syncer if it has its own."""
        if self.shelf is not None:
            self.shelf.close()
        if self._calls is not None:
            self._calls.close()

    def raise_failure(self) -> None:
        """Raises the error that left the ranks with different weights, if there was one."""
        if self._failure is not None:
            raise self._failure

    def _change(self, kind: str, layout: FragmentLayout, values: FlatArray) -> Work:
        if self.shelf is None:
            own = getattr(self._own, kind)(layout, values)
            broadcast = self._own.ordered(lambda: self._island.broadcast(_as_tensor(values)), values)

            def work() -> None:
                self._order(kind, layout)
                broadcast()
                own()
                self._note_change(layout)
        else:
            shares = self.shelf.shares(self.keep(values), layout)

            def work() -> None:
                self._order(kind, layout, key=shares.key)
                self._apply(kind, layout, shares.key)

        return lambda: self._guarded(work)

    def _guarded(self, work: Work) -> None:
        """Does work that all ranks take part in; if it fails, the island is over, whatever the exchange makes of it."""
        try:
            work()
        except BaseException as error:
            self._failure = error
            raise

    def _order(self, kind: str, layout: FragmentLayout, **others: int) -> None:
        names = [tensor.name for tensor in layout.tensors]
        self._island.order(do=kind, fragment=layout.name, tensors=names, **others)

    def _boxes(self, layout: FragmentLayout, *, once: bool) -> list[list[Box]]:
        """Returns what each rank holds of a fragment; with `once`, of replicas what the first one holds."""
        return [
            [
                Box(first, spec.shape, self._regions[rank][spec.name])
                for spec, first in zip(layout.tensors, layout.offsets, strict=True)
                if self._regions[rank][spec.name].numel and not (once and self._holders[spec.name][rank] != rank)
            ]
            for rank in range(self._island.size)
        ]

    # What every rank does.

    def obey(self, order: Mapping[str, Any]) -> None:
        """Does what the leader has ordered, at another rank."""
        kind: str = order["do"]
        layout = FragmentLayout(order["fragment"], tuple(self._specs[name] for name in order["tensors"]))
        if kind == "is_finite":
            self._island.gather(Word(Call.STEP, int(self._own.is_finite(layout))))
        elif kind == "snapshot":
            self._copy_share(layout, order["key"])
        elif "key" in order:
            self._apply(kind, layout, order["key"])
        else:
            values = self._own.buffer(layout)
            self._island.broadcast(_as_tensor(values))
            getattr(self._own, kind)(layout, values)()
            self._note_change(layout)

    def _apply(self, kind: str, layout: FragmentLayout, key: int) -> None:
        """Changes this rank's share of a fragment by what the shelf has for it; returns at the leader when all have."""
        assert self.shelf is not None
        self._own.reshard()
        values = self._own.from_host(self.shelf.things[key].numpy())
        getattr(self._own, kind)(self._share(layout, self._island.rank, self._specs), values)()
        self._note_change(layout)
        self._island.gather(Word(Call.STEP))

    def _copy_share(self, layout: FragmentLayout, key: int) -> None:
        """Copies this rank's share of a fragment, for the shelf; returns at the leader when all ranks have."""
        assert self.shelf is not None
        rank = self._island.rank
        names = {one.name for one in layout.tensors if self._holders[one.name][rank] == rank}
        self.shelf.things[key] = self._own_copy(layout, names)
        self._island.gather(Word(Call.STEP))

    def _share_on_host(self, share: FlatArray) -> NDArray[np.float32]:
        self._own.synchronize()
        return self._own.to_host(share)

    def _share(self, layout: FragmentLayout, rank: int, names: Container[str]) -> FragmentLayout:
        """Returns the layout of a rank's share of a fragment, of the named tensors."""
        regions = self._regions[rank]
        return FragmentLayout(
            layout.name,
            tuple(TensorSpec(one.name, regions[one.name].shape) for one in layout.tensors if one.name in names),
        )

    def _own_copy(self, layout: FragmentLayout, names: Container[str]) -> FlatArray:
        """Returns a copy of this rank's share of a fragment, of the named tensors."""
        share = self._share(layout, self._island.rank, names)
        values = self._own.buffer(share)
        if share.tensors:
            self._own.snapshot(share, values)()
        return values

    def _note_change(self, layout: FragmentLayout) -> None:
        """Sums up the weights that have replicas after a change; nothing waits for a GPU until `take_fingerprint`."""
        for holders, sums in zip(self._replications, self._sums, strict=True):
            if names := {one.name for one in layout.tensors if self._holders[one.name] == holders}:
                sums.append(_summed(_as_tensor(self._own_copy(layout, names))))

    def take_fingerprint(self) -> bytes:
        """Returns what replicas must agree on: the weights of what was changed since the last call, summed up.

        One digest for each way in which tensors have replicas.
        """
        taken, self._sums = self._sums, [[] for _ in self._replications]
        return b"".join(
            hashlib.sha256(repr([one.tolist() for one in sums]).encode()).digest()[:_FINGERPRINT_BYTES]
            for sums in taken
        )

    def differing(self, words: list[Word]) -> list[int]:
        """Returns the ranks whose weights are not those of the first rank that holds the same parts."""
        return sorted(
            {
                rank
                for place, holders in enumerate(self._replications)
                for rank, first in enumerate(holders)
                if _digest_at(place, words[rank]) != _digest_at(place, words[first])
            }
        )


def _digest_at(place: int, word: Word) -> bytes:
    return word.fingerprint[place * _FINGERPRINT_BYTES : (place + 1) * _FINGERPRINT_BYTES]


def _as_tensor(values: FlatArray) -> torch.Tensor:
    return values if isinstance(values, torch.Tensor) else torch.from_numpy(values)


def _summed(values: torch.Tensor) -> torch.Tensor:
    """Returns two sums over the bits of float32 values, which differ if a bit, or the order, does."""
    bits = values.view(torch.int32)
    whole = bits.numel() - bits.numel() % _FINGERPRINT_COLUMNS
    columns = bits[:whole].view(-1, _FINGERPRINT_COLUMNS).sum(0, dtype=torch.int64)
    places = torch.arange(1, _FINGERPRINT_COLUMNS + 1, device=bits.device)
    rest = bits[whole:].to(torch.int64)
    return torch.stack([bits.sum(dtype=torch.int64), (columns * places).sum() + (rest * places[: rest.numel()]).sum()])
