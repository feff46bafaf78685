"""One rank of a learner that has several processes: what its training loop calls.

Ranks meet at every call of `step` and `flush`: each says what it did, the leader exchanges, and all leave the meeting
with the same weights and the same view of the exchange.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed

from skerry.array_learner import LearnerOptions, SingleProcess
from skerry.errors import SkerryError, StopExchangingError, error_of
from skerry.exchange.settings import whole_number
from skerry.exchange.untrained import may_differ
from skerry.model.torch.parameters import CopyOf, TorchParameters
from skerry.net.grpc_transport import GrpcTransport
from skerry.net.transport import Transport
from skerry.ranks.island import Call, Island, Word
from skerry.ranks.parameters import IslandParameters
from skerry.runtime.identifiers import system_random
from skerry.stats import LastWork, Stats, View

# How long a rank that ends waits for the others to end too; Ctrl-C reaches all within milliseconds.
_AGREE_S: Final = 5.0


class ManyRanks:
    """The back end of one rank of several; every rank makes one, at the same time."""

    def __init__(
        self,
        group: distributed.ProcessGroup,
        model: torch.nn.Module | Mapping[str, torch.Tensor],
        options: LearnerOptions,
        *,
        copies: CopyOf | None = None,
    ) -> None:
        """Meets the other ranks; the leader joins the run.

        Frozen parameters have to be the same at all ranks, and shards of them at replicas, but for those allowed. Other
        ranks push their parts of deltas themselves, if no rank holds the whole model.

        Raises:
            StopExchangingError: RANKS_DIFFER, RANK_LEFT, or what the leader met in joining.
        """
        self._island = Island(group, timeout_s=options.get("connect_timeout_s", 30.0))
        self._leading: SingleProcess | None = None
        self._closing = ExitStack()
        self._last_work = LastWork()
        self._has_agreed = False  # all ranks leave after this step
        self.view = View("", Stats())
        allowed = options.get("allow_other_frozen", False)
        name = f"{options['run']} {options.get('learner_id')}"
        with self._together():
            own = TorchParameters(model, copies)
            self._closing.callback(own.release)
            own.check_in_memory()
            frozen = [one for one in own.untrained() if one.digest and not may_differ(one.name, allowed=allowed)]
            shards = [(shard, tuple(one.shape), one.dtype) for shard, one in own.frozen_shards.items()]
            self._meet(Word(Call.JOIN, fingerprint=_fingerprint(name, own.tensors, own.dtypes, frozen, shards)))

            def open_transport() -> Transport:
                return GrpcTransport(options["target"], tls=options.get("tls"), jitter=system_random())

            self._parameters = IslandParameters(self._island, own, open_transport, allow_other_frozen=allowed)
            self._closing.callback(self._parameters.close)

            def lead() -> None:
                self._leading = SingleProcess(self._parameters, options)

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
                changed, _ = self._leader.step(sum(word.token_count for word in words), mean, None)
                return changed, max(word.leave_status for word in words)

            changed, status = self._run(step)
            self._has_agreed = status >= 0
            return tuple(changed), status if self._has_agreed else None

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
        if self._island.has_left:
            return self._last_work
        with self._together():
            self._meet(Word(Call.LEAVE, fingerprint=self._parameters.take_fingerprint()))
            work = self._run(lambda: dataclasses.asdict(self._leader.leave(timeout_s, load_merged=load_merged)))
            self._last_work = LastWork(**work)
        self.close()
        return self._last_work

    def count_from(self, step_count: int, token_count: int) -> None:
        """Counts on from there."""
        with self._together():
            self._meet(Word(Call.COUNT, fingerprint=self._parameters.take_fingerprint()))
            self._run(lambda: self._leader.count_from(step_count, token_count))

    def merged_weights(self) -> dict[str, NDArray[np.float32]]:
        """Returns copies of the run's own weights at the leader, and nothing at other ranks."""
        return {} if self._leading is None else self._leading.merged_weights()

    def close(self, error: BaseException | None = None) -> None:
        """Leaves the run; the other ranks learn of `error`. Idempotent."""
        if error is not None:
            self._island.leave(error)
        with ExitStack() as last:
            last.callback(self._island.leave)
            last.push(self._closing.pop_all())
            if self._leading is not None:
                self._leading.close()

    def may_send_after(self, kind: type[BaseException] | None, *, is_told: bool) -> bool:
        """Whether all ranks leave now, by exceptions of this kind and after the same calls; waits 5 s for that."""
        if kind is None or self._has_agreed:
            return True
        is_asked = issubclass(kind, SystemExit | KeyboardInterrupt) and not self._island.has_left
        return is_asked and self._island.agree(kind.__name__, _AGREE_S)

    @property
    def _leader(self) -> SingleProcess:
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
                self.view = self.view._replace(failure=error)
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
            order: dict[str, Any] = {"do": "end", "result": result, "view": view_to_json(self._leader.view)}
            self._island.order(**order)
        else:
            while (order := self._island.ordered())["do"] != "end":
                self._parameters.obey(order)
        self.view = view_from_json(order["view"])
        return order["result"]


def view_to_json(view: View) -> list[Any]:
    """Returns it as what JSON has."""
    stats = {**vars(view.stats), "problem": _error_json(view.stats.problem)}
    return [*view._replace(stats=None, failure=_error_json(view.failure)), stats]  # type: ignore[arg-type]  # JSON's


def view_from_json(values: list[Any]) -> View:
    """Returns what `view_to_json` was made of."""
    *others, stats = values
    view = View(*others)
    stats = Stats(**{**stats, "problem": _error(stats["problem"])})
    return view._replace(stats=stats, failure=_error(others[-1]))


def _error_json(error: SkerryError | None) -> list[str] | None:
    return None if error is None else [error.reason, str(error)]


def _error(values: list[str] | None) -> SkerryError | None:
    return None if values is None else error_of(*values)


def _fingerprint(*values: object) -> bytes:
    return hashlib.sha256(repr(values).encode()).digest()[:16]
