"""One rank of a learner that has several processes: what its training loop calls.

Ranks meet at every call of `step` and `flush`: each says what it did, the leader exchanges, and all leave the meeting
with the same weights and the same view of the exchange.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from skerry.array_learner import ArrayLearner
from skerry.errors import SkerryError, StopExchangingError, error_of
from skerry.exchange.session import LastWork, Stats, whole_number
from skerry.exchange.untrained import may_differ
from skerry.model.interface import Parameters
from skerry.model.torch.parameters import CopyOf, TorchParameters
from skerry.net.transport import Transport
from skerry.ranks import account as island_account
from skerry.ranks.island import Call, Island, Word
from skerry.ranks.parameters import IslandParameters

# How long a rank that ends waits for the others to end too; Ctrl-C reaches all within milliseconds.
_AGREE_S: Final = 5.0


@dataclass(frozen=True)
class View:
    """What the leader knew at the end of the last meeting; the same at all ranks, so that their loops do the same."""

    stats: Stats
    progress: float | None = None
    planned: int = 0  # steps of each learner
    is_closed: bool = False
    failure: SkerryError | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns it as what JSON has."""
        stats = {**vars(self.stats), "problem": _error_json(self.stats.problem)}
        return {**vars(self), "stats": stats, "failure": _error_json(self.failure)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> View:
        """Returns what `to_json` was made of."""
        stats = Stats(**{**values["stats"], "problem": _error(values["stats"]["problem"])})
        return cls(**{**values, "stats": stats, "failure": _error(values["failure"])})


class IslandMember:
    """One rank; every rank of the island makes one, at the same time."""

    def __init__(
        self,
        island: Island,
        model: Any,
        join: Callable[[Parameters], ArrayLearner],
        view_of: Callable[[ArrayLearner], View],
        open_transport: Callable[[], Transport],
        *,
        name: str,
        allow_other_frozen: bool | Collection[str],
        copies: CopyOf | None = None,
    ) -> None:
        """Meets the other ranks; the leader joins the run by `join`. `name` says which learner of which run it is.

        Frozen parameters have to be the same at all ranks, and shards of them at replicas, but for those allowed. Other
        ranks push their parts of deltas by `open_transport`, if no rank holds the whole model.

        Raises:
            StopExchangingError: RANKS_DIFFER, RANK_LEFT, or what `join` raised at the leader.
        """
        self._island = island
        self._leading: ArrayLearner | None = None
        self._view_of = view_of
        self._closing = ExitStack()
        self._last_work = LastWork()
        self.view = View(Stats())
        with self._together():
            own = TorchParameters(model, copies)
            self._closing.callback(own.release)
            own.check_in_memory()
            frozen = [
                one for one in own.untrained() if one.digest and not may_differ(one.name, allowed=allow_other_frozen)
            ]
            shards = [(shard, tuple(one.shape), one.dtype) for shard, one in own.frozen_shards.items()]
            self._meet(Word(Call.JOIN, fingerprint=_fingerprint(name, own.tensors, own.dtypes, frozen, shards)))
            self._parameters = IslandParameters(island, own, open_transport, allow_other_frozen=allow_other_frozen)
            self._closing.callback(self._parameters.close)

            def lead() -> None:
                self._leading = join(self._parameters)

            self._run(lead)

    def step(self, tokens: int, loss: float | None, leave_status: int | None) -> tuple[tuple[str, ...], int | None]:
        """Reports one finished step: of its tokens, and losses, this rank's.

        Returns:
            The fragments that it changed, and the status with which all ranks are to leave now, if one of them is.
        """
        with self._together():
            tokens = whole_number(tokens, "tokens")
            if tokens < 0:
                raise ValueError(f"a rank trains on no fewer than 0 tokens. tokens={tokens}")
            if problem := self._parameters.replaced():
                raise StopExchangingError("WEIGHTS_REPLACED", problem)
            seen = self._parameters.take_fingerprint()
            leaving = -1 if leave_status is None else leave_status
            words = self._meet(Word(Call.STEP, tokens, loss is not None, float(loss or 0.0), leaving, seen))
            losses = [word.loss for word in words if word.has_loss]
            mean = sum(losses) / len(losses) if losses else None

            def step() -> tuple[tuple[str, ...], int]:
                changed = self._leader.step(sum(word.token_count for word in words), mean)
                return changed, max(word.leave_status for word in words)

            changed, status = self._run(step)
            return tuple(changed), None if status < 0 else status

    def flush(self, timeout_s: float, *, is_last: bool) -> bool:
        """Sends all unsent work."""
        with self._together():
            self._meet(Word(Call.FLUSH, fingerprint=self._parameters.take_fingerprint()))
            is_flushed: bool = self._run(lambda: self._leader.flush(timeout_s, is_last=is_last))
            return is_flushed

    def leave(self, timeout_s: float, *, load_merged: bool) -> LastWork:
        """Sends the last work and leaves the run, the leader before the others close what it needs for that.

        With `load_merged` at the leader, all ranks have the run's weights afterwards if they were loaded.
        """
        if self._island.has_left or self._island.process.is_forked:
            return self._last_work
        with self._together():
            self._meet(Word(Call.LEAVE, fingerprint=self._parameters.take_fingerprint()))
            work = self._run(lambda: dataclasses.asdict(self._leader.leave(timeout_s, load_merged=load_merged)))
            self._last_work = LastWork(**work)
        self.close()
        return self._last_work

    def state_dict(self) -> dict[str, Any]:
        """Returns the learner's account at the leader and nothing at other ranks, or each rank's share of it."""
        if self._island.has_left:
            return {} if self._leading is None else self._leading.state_dict()
        with self._together():
            self._meet(Word(Call.SAVE, fingerprint=self._parameters.take_fingerprint()))
            account: dict[str, Any] = {}
            shelf = self._parameters.shelf

            def save() -> dict[str, Any] | None:
                account.update(self._leader.state_dict())
                return None if shelf is None else island_account.described(account, self._island.size)

            told = self._run(save)
            if shelf is None:
                return account
            own = island_account.share_of(told, shelf, self._island.rank)
            self._island.gather(Word(Call.SAVE))  # the leader forgets its vectors once every rank has its part of them
            return own

    def load_state_dict(self, states: Sequence[Mapping[str, Any]], *, drop_incomplete: bool) -> None:
        """Goes on with the account of which the ranks give the shares; warns if they have none."""
        with self._together():
            self._meet(Word(Call.LOAD, fingerprint=self._parameters.take_fingerprint()))
            account = island_account.joined(
                states, self._island, self._parameters.keep, drop_incomplete=drop_incomplete
            )

            def load() -> None:
                if account is not None:
                    self._leader.load_state_dict(account)

            self._run(load)

    def count_from(self, step_count: int, token_count: int) -> None:
        """Counts on from there."""
        with self._together():
            self._meet(Word(Call.COUNT, fingerprint=self._parameters.take_fingerprint()))
            self._run(lambda: self._leader.count_from(step_count, token_count))

    def merged_weights(self) -> dict[str, NDArray[np.float32]]:
        """Returns copies of the run's own weights at the leader, and nothing at other ranks."""
        return {} if self._leading is None else self._leading.merged_weights()

    def close(self, error: object = None) -> None:
        """Leaves the run; the other ranks learn of `error`. Idempotent, and does nothing in a forked child."""
        if self._island.process.is_forked:
            return
        if error is not None:
            self._island.leave(error)
        with ExitStack() as last:
            last.callback(self._island.leave)
            last.push(self._closing.pop_all())
            if self._leading is not None:
                self._leading.close()

    def have_all_left(self, kind: str) -> bool:
        """Returns whether all ranks leave now, by exceptions of this kind and after the same calls; waits 5 s."""
        return not (self._island.has_left or self._island.process.is_forked) and self._island.agree(kind, _AGREE_S)

    @property
    def _leader(self) -> ArrayLearner:
        assert self._leading is not None
        return self._leading

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Makes an error of one rank an error of all; the island is over then."""
        self._island.process.check()
        try:
            yield
        except BaseException as error:
            if isinstance(error, SkerryError):
                self.view = dataclasses.replace(self.view, failure=error)
            self.close(error)
            raise

    def _meet(self, word: Word) -> list[Word]:
        """Returns all ranks' words to the leader.

        Raises:
            StopExchangingError: RANKS_DIFFER.
        """
        words = self._island.gather(word)
        calls = defaultdict(list)
        for rank, said in enumerate(words):
            calls[Call(said.call).name.lower()].append(rank)
        if len(calls) > 1:
            raise StopExchangingError(
                "RANKS_DIFFER",
                f"the ranks of an island must make the same calls in the same order. ranks={dict(calls)}",
            )
        if words and word.call == Call.JOIN and len({said.fingerprint for said in words}) > 1:
            raise StopExchangingError(
                "RANKS_DIFFER",
                "the ranks of an island must name the same run and learner, and have models of the same parameters, "
                "types and frozen values. To make each process a learner of its own, give each a process_group of one "
                "rank",
            )
        if words and word.call != Call.JOIN and (differing := self._parameters.differing(words)):
            raise StopExchangingError(
                "RANKS_DIFFER",
                "the ranks' weights differ: after the last adoption they had to be equal. Train all ranks with the "
                "same optimizer and settings, and with gradients that are averaged over the ranks "
                "(DistributedDataParallel, fully_shard); ranks of tensor parallelism read the same batches. differing "
                f"from the first rank that holds the same weights={differing}",
            )
        return words

    def _run(self, work: Callable[[], Any]) -> Any:
        """Returns what `work` returned at the leader, after doing what it takes at every rank."""
        if self._island.is_leader:
            result = work()
            self._parameters.raise_failure()
            order: dict[str, Any] = {"do": "end", "result": result, "view": self._view_of(self._leader).to_json()}
            self._island.order(**order)
        else:
            while (order := self._island.ordered())["do"] != "end":
                self._parameters.obey(order)
        self.view = View.from_json(order["view"])
        return order["result"]


def _error_json(error: SkerryError | None) -> list[str] | None:
    return None if error is None else [error.reason, str(error)]


def _error(values: list[str] | None) -> SkerryError | None:
    return None if values is None else error_of(*values)


def _fingerprint(*values: object) -> bytes:
    return hashlib.sha256(repr(values).encode()).digest()[:16]
