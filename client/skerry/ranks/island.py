"""The processes of one learner: how the ranks of a torch process group talk while they are a learner together.

The group's first rank leads: it attaches to the run. At each meeting the others tell it what they have done, and
then do what it orders until it says that the meeting is over. Words and orders travel over a gloo group of their own,
so they wait for no GPU; the weights of models on GPUs travel over the group that was given.

A rank that fails says why in the group's store and closes its connections. That ends the others' wait at once.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from enum import IntEnum
from itertools import count
from typing import Any, Final, NamedTuple

import torch
from torch import distributed

from skerry.errors import SkerryError, StopExchangingError, error_of
from skerry.net.forks import OwnProcess

# An order's first broadcast; a longer one takes a second. Most fit.
_ORDER_SIZE_BYTES: Final = 4096
_LENGTH: Final = struct.Struct("<I")
_NUMBERS: Final = count()


class Call(IntEnum):
    """What a rank's training loop has called."""

    JOIN = 0
    STEP = 1
    FLUSH = 2
    LEAVE = 3
    SAVE = 4
    LOAD = 5
    COUNT = 6


class Word(NamedTuple):
    """What a rank tells the leader at a meeting."""

    call: int
    token_count: int = 0
    has_loss: bool = False
    loss: float = 0.0
    leave_status: int = -1  # with which the process is to end after this step; -1: it is not
    fingerprint: bytes = b""  # of what the ranks must have in common; of the same size at all ranks


_WORD: Final = struct.Struct("<Bq?di")  # before the fingerprint


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
        self.is_leader = self.rank == 0
        self._ranks = ranks
        self._data = group
        store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no public name for it
        self._was_told = False  # that another rank failed
        self._meeting_count = 0
        self._store = distributed.PrefixStore(  # type: ignore[attr-defined]
            f"skerry/{'-'.join(map(str, ranks))}/{next(_NUMBERS)}", store
        )
        self._meet_all(timeout_s)
        self._groups: list[distributed.ProcessGroup] = []  # none once this rank has left
        self._control = self.new_group()

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

    def new_group(self, timeout: timedelta | None = None) -> distributed.ProcessGroup:
        """Returns another gloo group of the same ranks; every rank must ask for it."""
        try:
            group: distributed.ProcessGroup = distributed.new_group(
                self._ranks, timeout, backend="gloo", use_local_synchronization=True
            )
        except RuntimeError as error:  # a rank that had its connections already has failed
            raise self._why(error) from error
        self._groups.append(group)
        return group

    @property
    def has_left(self) -> bool:
        """Whether this rank has closed its connections."""
        return not self._groups

    def leave(self, error: object = None) -> None:
        """Closes this rank's connections; `error` says to the other ranks why. Idempotent."""
        if not self._groups:
            return
        if error is not None and not self._was_told:
            kind = "" if isinstance(error, SkerryError) else f"{type(error).__name__}: "
            reason = error.reason if isinstance(error, SkerryError) else "RANK_LEFT"
            with suppress(RuntimeError):
                if not self._store.check(["failure"]):
                    said = {"rank": self.rank, "reason": reason, "because": f"{kind}{error}"}
                    self._store.set("failure", json.dumps(said))
        groups, self._groups = self._groups, []
        for group in reversed(groups):
            with suppress(ValueError, RuntimeError, AssertionError):  # the program may have destroyed all groups before
                distributed.destroy_process_group(group)
        del self._control  # the last reference closes its connections

    def agree(self, what: str, timeout_s: float) -> bool:
        """Returns whether all ranks say the same after as many meetings, within the timeout. Call it once."""
        said = f"{what} {self._meeting_count}"
        keys = [f"agree/{rank}" for rank in range(self.size)]
        with suppress(RuntimeError):
            self._store.set(keys[self.rank], said)
            self._store.wait(keys, timedelta(seconds=timeout_s))
            return all(self._store.get(key).decode() == said for key in keys)
        return False

    def gather(self, word: Word) -> list[Word]:
        """Returns the words of all ranks to the leader, and nothing to the others."""
        self._meeting_count += 1
        mine = _bytes(_WORD.pack(*word[:-1]) + word.fingerprint)
        words = [torch.empty_like(mine) for _ in range(self.size)] if self.is_leader else None
        with self._talking() as group:
            distributed.gather(mine, words, dst=self._ranks[0], group=group)
        said = [one.numpy().tobytes() for one in words or ()]
        return [Word(*_WORD.unpack_from(one))._replace(fingerprint=one[_WORD.size :]) for one in said]

    def all_gather(self, own: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Returns what each rank gives, at every rank."""
        every: list[Any] = [None] * self.size
        with self._talking() as group:
            distributed.all_gather_object(every, own, group=group)
        return every

    def order(self, **order: Any) -> None:
        """Tells every rank what to do next; the leader only."""
        data = json.dumps(order).encode()
        first = _LENGTH.pack(len(data)) + data[: _ORDER_SIZE_BYTES - _LENGTH.size]
        with self._talking() as group:
            buffer = _bytes(first.ljust(_ORDER_SIZE_BYTES, b"\0"))
            distributed.broadcast(buffer, self._ranks[0], group=group)
            if rest := data[_ORDER_SIZE_BYTES - _LENGTH.size :]:
                distributed.broadcast(_bytes(rest), self._ranks[0], group=group)

    def ordered(self) -> dict[str, Any]:
        """Returns the leader's next order."""
        with self._talking() as group:
            buffer = torch.empty(_ORDER_SIZE_BYTES, dtype=torch.uint8, device="cpu")
            distributed.broadcast(buffer, self._ranks[0], group=group)
            data = buffer.numpy().tobytes()
            (size,) = _LENGTH.unpack_from(data)
            data = data[_LENGTH.size : _LENGTH.size + size]
            if size > len(data):
                rest = torch.empty(size - len(data), dtype=torch.uint8, device="cpu")
                distributed.broadcast(rest, self._ranks[0], group=group)
                data += rest.numpy().tobytes()
        order: dict[str, Any] = json.loads(data)
        return order

    def broadcast(self, values: torch.Tensor) -> None:
        """Makes `values` those of the leader on every rank, on the device where they are."""
        with self._talking() as group:
            is_on_host = values.device.type == "cpu"
            distributed.broadcast(values, self._ranks[0], group=group if is_on_host else self._data)

    def send(
        self, values: torch.Tensor, rank: int, over: distributed.ProcessGroup | None = None, *, tag: int = 0
    ) -> None:
        """Sends a tensor of the host to a rank, by default between two orders."""
        with self._talking() as control:
            distributed.send(values, self._ranks[rank], group=over or control, tag=tag)

    def receive(
        self, values: torch.Tensor, rank: int, over: distributed.ProcessGroup | None = None, *, tag: int = 0
    ) -> None:
        """Overwrites a tensor of the host with what a rank sends."""
        with self._talking() as control:
            distributed.recv(values, self._ranks[rank], group=over or control, tag=tag)

    def exchange(
        self, values: Sequence[torch.Tensor], counts: list[int], over: distributed.ProcessGroup
    ) -> torch.Tensor:
        """Sends float32 values to each rank, and returns those of all ranks, `counts` of each; every rank calls it."""
        arrived = torch.empty(sum(counts), dtype=torch.float32)
        with self._talking():
            distributed.all_to_all_single(arrived, torch.cat([*values]), counts, [len(one) for one in values], over)
        return arrived

    @contextmanager
    def _talking(self) -> Iterator[distributed.ProcessGroup]:
        """Yields the group, and turns its errors into the reason of the rank that left."""
        left = StopExchangingError("RANK_LEFT", "this rank has left its island")
        if not self._groups:
            raise left
        try:
            yield self._control
        except RuntimeError as error:
            raise self._why(error) from error
        except ValueError as error:
            if self._groups:
                raise
            raise left from error  # torch could not name the group that `close` took from a thread that waited

    def _why(self, error: RuntimeError) -> SkerryError:
        """Returns the error of the rank that failed, or of one that is gone without a word."""
        self._was_told = True
        said = {"rank": "?", "reason": "RANK_LEFT", "because": str(error).splitlines()[0]}
        with suppress(RuntimeError):
            if self._store.check(["failure"]):
                said = json.loads(self._store.get("failure"))
        return error_of(
            said["reason"],
            "a rank of this island failed. Start all its processes again: the island joins the run again, with any "
            f"number of ranks. rank={said['rank']}, because={said['because']}",
        )


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


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
    if any(isinstance(one, FullyShardedDataParallel) for one in modules):
        raise ValueError(
            "FSDP1 (FullyShardedDataParallel) keeps the weights in a form of its own, which can't be exchanged. Shard "
            "the model with fully_shard (FSDP2)"
        )
    wrappers = [one for one in modules if isinstance(one, torch.nn.parallel.DistributedDataParallel)]
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
