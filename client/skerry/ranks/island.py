"""The processes of one learner: how the ranks of a torch process group talk while they are a learner together.

They talk over a gloo group of their own, which waits for no GPU; the weights of models on GPUs travel over the group
that was given. Every rank makes the same calls in the same order, on one thread at a time.

A rank that fails says why in the group's store and closes its connections. That ends the others' wait at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from typing import Any, Final, TypeVar

import torch
from torch import distributed

from skerry.errors import SkerryError, StopExchangingError, error_of
from skerry.net.forks import OwnProcess

_NUMBERS: Final = count()
T = TypeVar("T")


class Island:
    """The ranks of a process group, at one of them."""

    def __init__(self, group: distributed.ProcessGroup, *, timeout_s: float) -> None:
        """Waits until every rank of the group has made its own.

        Raises:
            StopExchangingError: RANK_LEFT: not all did in time.
        """
        ranks = distributed.get_process_group_ranks(group)
        self.process = OwnProcess()
        self.rank = distributed.get_rank(group)
        self.size = len(ranks)
        self._ranks = ranks
        self._data = group
        store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no public name for it
        self._was_told = False  # that another rank failed
        self._meeting_count = 0
        self._store = distributed.PrefixStore(  # type: ignore[attr-defined]
            f"skerry/{'-'.join(map(str, ranks))}/{next(_NUMBERS)}", store
        )
        self._meet_all(timeout_s)
        self._control: distributed.ProcessGroup | None = None  # None once this rank has left
        try:
            self._control = distributed.new_group(ranks, backend="gloo", use_local_synchronization=True)
        except RuntimeError as error:  # a rank that had its connections already has failed
            raise self._why(error) from error

    def _meet_all(self, timeout_s: float) -> None:
        self._store.set(str(self.rank), "here")
        try:
            self._store.wait([str(rank) for rank in range(self.size)], timedelta(seconds=timeout_s))
        except RuntimeError as error:
            missing = [rank for rank in range(self.size) if not self._store.check([str(rank)])]
            raise StopExchangingError(
                "RANK_LEFT",
                "some ranks of the process group have made no Learner: make it on every rank, since each adopts what "
                f"the run merges. To train in one process, give it a process_group of its own. missing={missing}",
            ) from error

    @property
    def has_left(self) -> bool:
        """Whether this rank has closed its connections."""
        return self._control is None

    def leave(self, error: object = None) -> None:
        """Closes this rank's connections; `error` says to the other ranks why. Idempotent."""
        if self._control is None:
            return
        if error is not None and not self._was_told:
            kind = "" if isinstance(error, SkerryError) else f"{type(error).__name__}: "
            reason = error.reason if isinstance(error, SkerryError) else "RANK_LEFT"
            with suppress(RuntimeError):
                if not self._store.check(["failure"]):
                    failure = {"rank": self.rank, "reason": reason, "because": f"{kind}{error}"}
                    self._store.set("failure", json.dumps(failure))
        group, self._control = self._control, None  # the last reference closes the connections
        with suppress(ValueError, RuntimeError, AssertionError):  # the program may have destroyed all groups before
            distributed.destroy_process_group(group)

    def agree(self, words: str, timeout_s: float) -> bool:
        """Returns whether all ranks say the same after as many meetings, within the timeout. Call it once."""
        message = f"{words} {self._meeting_count}"
        keys = [f"agree/{rank}" for rank in range(self.size)]
        with suppress(RuntimeError):
            self._store.set(keys[self.rank], message)
            self._store.wait(keys, timedelta(seconds=timeout_s))
            return all(self._store.get(key).decode() == message for key in keys)
        return False

    def all_gather(self, own: T) -> list[T]:
        """Returns what each rank gives, at every rank."""
        self._meeting_count += 1
        gathered: list[Any] = [None] * self.size
        with self._talking() as group:
            distributed.all_gather_object(gathered, own, group=group)
        return gathered

    def tell(self, rank: int, order: Any = None) -> Any:
        """Returns what one rank tells, at every rank; the others call it without an order. None ends a rank's turn."""
        told = [order]
        with self._talking() as group:
            distributed.broadcast_object_list(told, self._ranks[rank], group=group)
        return told[0]

    def broadcast(self, values: torch.Tensor, rank: int) -> None:
        """Makes `values` those of a rank on every rank, on the device where they are."""
        with self._talking() as group:
            is_on_host = values.device.type == "cpu"
            distributed.broadcast(values, self._ranks[rank], group=group if is_on_host else self._data)

    def send(self, values: torch.Tensor, rank: int) -> None:
        """Sends a tensor of the host to a rank, which receives it."""
        with self._talking() as group:
            distributed.send(values, self._ranks[rank], group=group)

    def receive(self, values: torch.Tensor, rank: int) -> None:
        """Overwrites a tensor of the host with what a rank sends."""
        with self._talking() as group:
            distributed.recv(values, self._ranks[rank], group=group)

    @contextmanager
    def _talking(self) -> Iterator[distributed.ProcessGroup]:
        """Yields the group, and turns its errors into the reason of the rank that left."""
        if self._control is None:
            raise StopExchangingError("RANK_LEFT", "this rank has left its island")
        try:
            yield self._control
        except RuntimeError as error:
            raise self._why(error) from error

    def _why(self, error: RuntimeError) -> SkerryError:
        """Returns the error of the rank that failed, or of one that is gone without a word."""
        self._was_told = True
        failure = {"rank": "?", "reason": "RANK_LEFT", "because": str(error).splitlines()[0]}
        with suppress(RuntimeError):
            if self._store.check(["failure"]):
                failure = json.loads(self._store.get("failure"))
        return error_of(
            failure["reason"],
            "a rank of this island failed. Start all its processes again: the island joins the run again, with any "
            f"number of ranks. rank={failure['rank']}, because={failure['because']}",
        )


def process_group_of(
    model: torch.nn.Module | Mapping[str, torch.Tensor], given: distributed.ProcessGroup | None
) -> distributed.ProcessGroup | None:
    """Returns the process group that trains `model`: the given one, else DistributedDataParallel's, else the default.

    None if one process trains it.

    Raises:
        ValueError: `given` is not the group of the model, or this process is not in it; or FSDP1 shards the model.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    from torch.distributed.fsdp import FullyShardedDataParallel  # takes a second

    modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    if any(isinstance(module, FullyShardedDataParallel) for module in modules):
        raise ValueError(
            "FSDP1 (FullyShardedDataParallel) keeps the weights in a form of its own, which can't be exchanged. Shard "
            "the model with fully_shard (FSDP2)"
        )
    wrappers = [module for module in modules if isinstance(module, torch.nn.parallel.DistributedDataParallel)]
    whole = wrappers[0].process_group if wrappers else None
    group = given or whole or distributed.group.WORLD
    if not isinstance(group, distributed.ProcessGroup):
        raise ValueError("this process is not a rank of process_group")  # noqa: TRY004 - it is no process group's type
    ranks = distributed.get_process_group_ranks(group)
    if whole is not None and (trained_by := distributed.get_process_group_ranks(whole)) != ranks:
        raise ValueError(
            "process_group must be that of DistributedDataParallel, since all its ranks have to adopt what the run "
            f"merges. process_group={ranks}, model={trained_by}"
        )
    return group if len(ranks) > 1 else None
