"""The weights of a model that several processes hold, as the exchange of one of them reads and writes them.

Either every rank holds the whole model (DistributedDataParallel), or each holds a box of each tensor (`fully_shard`,
tensor parallelism, or both). Several ranks may hold the same box: they are replicas of that tensor.

While a rank has its turn (`skerry.ranks.turns`), its exchange copies and changes whole fragments. It tells the other
ranks each such operation, and they take their part in it: shards of a copy are sent to the rank, and a change is sent
to all. A rank's share of a fragment is its boxes of the fragment's tensors, one after another, as one flat vector; one
share at a time is in memory beside the fragment.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from skerry.algorithm.rebase import FlatArray
from skerry.errors import StopExchangingError
from skerry.exchange.untrained import may_differ
from skerry.model.interface import UNLIMITED, Work
from skerry.model.torch.parameters import TorchParameters
from skerry.model.torch.shards import Region, first_holders
from skerry.ranks.island import Island
from skerry.runtime.vectors import vector
from skerry.wire import FragmentLayout, TensorSpec
from skerry.wire.frames import encode_frames
from skerry.wire.untrained import UntrainedTensor


class IslandParameters:
    """The parameters of one rank, `own`, and in its turn, as `Parameters`, those of the island.

    Raises:
        ValueError: the ranks together do not hold every tensor exactly once, replicas aside.
        StopExchangingError: RANKS_DIFFER: replicas have other frozen values, of parameters not allowed to differ.
    """

    def __init__(self, island: Island, own: TorchParameters, *, allow_other_frozen: bool | Collection[str]) -> None:
        """Every rank makes one, at the same time."""
        self._island = island
        self._own = own
        self.tensors = own.tensors
        self.dtypes = own.dtypes
        self.replaced = own.replaced
        self.enter_worker = own.enter_worker
        self.synchronize = own.synchronize
        self.is_float32 = own.is_float32
        self._specs = {tensor.name: tensor for tensor in own.tensors}
        self._regions: list[Mapping[str, Region]] = island.all_gather(own.regions)
        # Of each tensor, for each rank, the first rank that holds the same part.
        self._holders = {name: first_holders([regions[name] for regions in self._regions]) for name in self._specs}
        self._is_whole = all(
            regions[name].shape == spec.shape for regions in self._regions for name, spec in self._specs.items()
        )
        self._changed: list[str] = []  # fragments
        self._sums: list[tuple[str, torch.Tensor]] = []  # of tensors that were changed and have replicas
        self._failure: BaseException | None = None
        self._check_cover()
        self._untrained = self._all_untrained(allowed=allow_other_frozen)
        self.encode, self.buffer, self.from_host, self.to_host = own.encode, own.buffer, own.from_host, own.to_host
        if not self._is_whole:  # what is gathered of shards is on the host
            self.encode, self.buffer = encode_frames, lambda layout: vector(layout.numel)
            self.from_host = self.to_host = lambda values: values
        # Two whole vectors of a fragment are needed to adopt it: more at a time would be more than a rank has room for.
        self.moving_limit = UNLIMITED if self._is_whole else 1

    def _check_cover(self) -> None:
        for name, spec in self._specs.items():
            held = sum(region.numel for region in {regions[name] for regions in self._regions})
            if held != spec.numel:
                raise ValueError(
                    "the ranks do not hold every element of a parameter once: the learner's process_group must have "
                    f"all ranks of the model's mesh. parameter={name}, numel={spec.numel}, held={held}"
                )

    def _all_untrained(self, *, allowed: bool | Collection[str]) -> tuple[UntrainedTensor, ...]:
        ranks = self._island.all_gather(self._own.frozen_parts())
        held = {}
        for name in set.intersection(*map(set, ranks)):
            parts = [rank[name] for rank in ranks]
            firsts = first_holders([part.region for part in parts])
            if parts != [parts[first] for first in firsts] and not may_differ(name, allowed=allowed):
                raise StopExchangingError(
                    "RANKS_DIFFER",
                    "the frozen values of ranks that hold the same part of a frozen parameter must be the same. "
                    f"parameter={name}",
                )
            held[name] = [parts[first] for first in set(firsts)]
        return self._own.untrained(held)

    # What the exchange of the rank that has the turn asks for.

    def untrained(self) -> tuple[UntrainedTensor, ...]:
        """Returns frozen parameters and persistent buffers."""
        return self._untrained

    def snapshot(self, layout: FragmentLayout, out: FlatArray) -> Work:
        """Returns a function that copies the weights to `out`."""
        if self._is_whole:
            return self._own.snapshot(layout, out)
        return self._together("snapshot", layout, lambda: self._gather(layout, self._island.rank, out))

    def add(self, layout: FragmentLayout, shift: FlatArray) -> Work:
        """Returns a function that adds to the weights on all ranks."""
        return self._change("add", layout, shift)

    def load(self, layout: FragmentLayout, values: FlatArray) -> Work:
        """Returns a function that overwrites the weights on all ranks."""
        return self._change("load", layout, values)

    def _change(self, kind: str, layout: FragmentLayout, values: FlatArray) -> Work:
        rank = self._island.rank
        if not self._is_whole:
            return self._together(kind, layout, lambda: self._scatter(kind, layout, rank, values))
        own = getattr(self._own, kind)(layout, values)
        broadcast = self._own.ordered(lambda: self._island.broadcast(torch.as_tensor(values), rank), values)

        def work() -> None:
            broadcast()
            own()
            self._note_change(layout)

        return self._together(kind, layout, work)

    def _together(self, kind: str, layout: FragmentLayout, part: Work) -> Work:
        """Returns work that all ranks take part in; if it fails, the island is over, whatever the exchange makes of it.

        `part` is this rank's.
        """
        names = tuple(tensor.name for tensor in layout.tensors)

        def work() -> None:
            try:
                self._island.tell(self._island.rank, (kind, layout.name, names))
                part()
            except BaseException as error:
                self._failure = error
                raise

        return work

    def end_turn(self) -> None:
        """Lets the other ranks go on; raises the error that left the ranks with different weights, if there was one."""
        if self._failure is not None:
            raise self._failure
        self._island.tell(self._island.rank)

    # What every rank does.

    def obey(self, rank: int) -> None:
        """Takes part in what a rank does in its turn, until that ends."""
        while (order := self._island.tell(rank)) is not None:
            kind, fragment, names = order
            layout = FragmentLayout(fragment, tuple(self._specs[name] for name in names))
            if kind == "snapshot":
                self._gather(layout, rank)
            elif not self._is_whole:
                self._scatter(kind, layout, rank, None)
            else:
                values = self._own.buffer(layout)
                self._island.broadcast(torch.as_tensor(values), rank)
                getattr(self._own, kind)(layout, values)()
                self._note_change(layout)

    def _gather(self, layout: FragmentLayout, owner: int, out: NDArray[np.float32] | None = None) -> None:
        """Copies the weights of a fragment to `out` at its owner; of replicas the first one sends."""
        island = self._island
        for rank in range(island.size):
            names = [spec.name for spec in layout.tensors if self._holders[spec.name][rank] == rank]
            share = self._share(layout, rank, names)
            if not share.numel or island.rank not in (owner, rank):
                continue
            if island.rank == rank:
                values = self._own.buffer(share)
                self._own.snapshot(share, values)()
                values = torch.from_numpy(self._own.to_host(values))
            else:
                values = torch.empty(share.numel, dtype=torch.float32, device="cpu")
                island.receive(values, rank)
            if out is None:
                island.send(values, owner)
            else:
                for place, piece in self._pieces(layout, rank, torch.from_numpy(out), values, names):
                    place.copy_(piece)

    def _scatter(
        self,
        kind: str,
        layout: FragmentLayout,
        owner: int,
        values: NDArray[np.float32] | None,
    ) -> None:
        """Changes the weights of a fragment at all ranks by the owner's `values`."""
        island = self._island
        self._own.reshard()
        for rank in [other for other in range(island.size) if other != owner] + [owner]:
            share = self._share(layout, rank, self._specs)
            if not share.numel or island.rank not in (owner, rank):
                continue
            held = torch.empty(share.numel, dtype=torch.float32, device="cpu")
            if values is None:
                island.receive(held, owner)
            else:
                for place, piece in self._pieces(layout, rank, torch.from_numpy(values), held, self._specs):
                    piece.copy_(place)
            if island.rank != rank:
                island.send(held, rank)
            else:
                getattr(self._own, kind)(share, self._own.from_host(held.numpy()))()
        self._note_change(layout)

    def _share(self, layout: FragmentLayout, rank: int, names: Collection[str]) -> FragmentLayout:
        """Returns the layout of a rank's share of a fragment, of the named tensors."""
        regions = self._regions[rank]
        held = (spec.name for spec in layout.tensors if spec.name in names and regions[spec.name].numel)
        return FragmentLayout(layout.name, tuple(TensorSpec(name, regions[name].shape) for name in held))

    def _pieces(
        self, layout: FragmentLayout, rank: int, whole: torch.Tensor, share: torch.Tensor, names: Collection[str]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields for each box of a rank's share its place in the fragment, and its place in the share, as views."""
        start = 0
        for spec, first in zip(layout.tensors, layout.offsets, strict=True):
            region = self._regions[rank][spec.name]
            if spec.name in names and region.numel:
                box = whole[first : first + spec.numel].view(spec.shape)[region.slices]
                yield box, share[start : start + region.numel].view(region.shape)
                start += region.numel

    def _note_change(self, layout: FragmentLayout) -> None:
        """Sums up the weights that have replicas after a change; nothing waits for a GPU until `take_sums`."""
        self._changed.append(layout.name)
        replicated = [spec.name for spec in layout.tensors if len({*self._holders[spec.name]}) < self._island.size]
        self._sums += [(name, self._own.bits_sum(name)) for name in replicated]

    def take_changed(self) -> tuple[str, ...]:
        """Returns the fragments that were changed since the last call, the same at every rank."""
        changed, self._changed = self._changed, []
        return tuple(dict.fromkeys(changed))

    def take_sums(self) -> list[tuple[str, int]]:
        """Returns what replicas must agree on: sums over the bits of the tensors changed since the last call."""
        taken, self._sums = self._sums, []
        values = torch.stack([value for _, value in taken]).tolist() if taken else []
        return [(name, value) for (name, _), value in zip(taken, values, strict=True)]

    def differing(self, sums: Sequence[Sequence[tuple[str, int]]]) -> list[int]:
        """Returns the ranks whose weights are not those of the first rank that holds the same parts."""
        return sorted(
            {
                rank
                for place, (name, _) in enumerate(sums[0])
                for rank, first in enumerate(self._holders[name])
                if sums[rank][place] != sums[first][place]
            }
        )
