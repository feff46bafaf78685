"""One rank of a learner that has several processes: what its training loop calls.

Each fragment of the model has one rank that exchanges it with the run, as a learner of one process exchanges all of
its fragments; the first rank also keeps the lease. Ranks meet at every call of `step` and `flush`: each says what it
did and what waits for the step boundary, they do that in turns, and all leave the meeting with the same weights and
the same view of the exchange.
"""

from __future__ import annotations

import hashlib
import socket
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import or_
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed

from skerry.array_learner import LearnerOptions, SingleProcess, settings_of
from skerry.errors import SkerryError, StopExchangingError
from skerry.exchange.settings import ExchangeSettings, whole_number
from skerry.model.torch.parameters import CopyOf, TorchParameters
from skerry.net.transport import LANE_COUNT
from skerry.ranks.island import Island
from skerry.ranks.parameters import IslandParameters
from skerry.ranks.turns import TurnBoundary, Waiting
from skerry.runtime.addresses import is_store
from skerry.runtime.identifiers import SystemEntropy
from skerry.runtime.logs import get_logger
from skerry.stats import LastWork, Stats, share_of_plan, sum_of
from skerry.v1 import exchange_pb2

_log = get_logger(__name__)

# How long a rank that ends waits for the others to end too; Ctrl-C reaches all within milliseconds.
_AGREE_S: Final = 5.0


@dataclass(frozen=True)
class RankReport:
    """What a rank tells the others at a meeting."""

    call: str  # which it has made, of the training loop
    stats: Stats  # of its own fragments
    waiting: Waiting
    sums: list[tuple[str, int]]  # of what was changed since the last meeting: replicas must have the same
    heard: list[exchange_pb2.AttachResponse]  # from the syncer, by the first rank
    told: Any = None  # what this call is about


class ManyRanks(SingleProcess):
    """The back end of one rank of several; every rank makes one, at the same time."""

    _boundary: TurnBoundary

    def __init__(
        self,
        group: distributed.ProcessGroup,
        model: torch.nn.Module | Mapping[str, torch.Tensor],
        options: LearnerOptions,
        *,
        copies: CopyOf | None = None,
    ) -> None:
        """Meets the other ranks and joins the run.

        Frozen parameters have to be the same at all ranks, and shards of them at replicas, but for those allowed.

        Raises:
            StopExchangingError: RANKS_DIFFER, RANK_LEFT.
            SkerryError: why a rank could not join.
        """
        settings = settings_of(**options)
        self._island = Island(group, timeout_s=settings.connect_timeout_s)
        self._closing = ExitStack()
        self._last_work = LastWork()
        self._work_of_all: LastWork | None = None  # what all ranks left with
        self._failure: SkerryError | None = None
        self._heard: deque[exchange_pb2.AttachResponse] = deque()  # from the syncer, by the first rank
        self._restoring: Future[None] | None = None
        self._reports: list[RankReport] = []
        self._call = ""
        self._has_agreed = False  # all ranks leave after this step
        self._is_joining = True
        with self._together():
            own = TorchParameters(model, copies)
            self._closing.callback(own.release)
            own.check_in_memory()
            self._check_same((settings.run, options.get("learner_id"), own.tensors, own.dtypes))
            self._parameters = IslandParameters(self._island, own, allow_other_frozen=settings.allow_other_frozen)
            self._join(settings, options)

    def _check_same(self, described: object) -> None:
        digest = hashlib.sha256(repr(described).encode()).digest()
        if len({*self._island.all_gather(digest)}) > 1:
            raise StopExchangingError(
                "RANKS_DIFFER",
                "the ranks of an island must name the same run and learner, and have models of the same parameters and "
                "types. To make each process a learner of its own, give each a process_group of one rank",
            )

    def _join(self, settings: ExchangeSettings, options: LearnerOptions) -> None:
        """Joins the run, one rank after another; the first one may create it."""
        island, rank = self._island, self._island.rank
        learner_id, session_id = island.tell(0, (settings.learner_id, SystemEntropy().hex_id()))
        settings = replace(
            settings,
            learner_id=learner_id,
            session_id=session_id,
            create=settings.create and rank == 0,
        )
        options = {**options, "target": self._shared(options)}
        self._open(
            self._parameters,
            settings,
            options,
            boundary=partial(TurnBoundary, rank=rank, parameters=self._parameters, meet=self._meet_again),
            lane_count=max(1, LANE_COUNT // island.size),
            others=lambda: [report.stats for report in self._reports[1:]],
            relay=self._heard.append,
        )
        reaches = True
        try:
            self._thread.run(self._exchange.connect())
        except SkerryError as error:
            if rank == 0:
                raise
            reaches = False
            _log.warning("this rank does not reach the syncer, so others exchange for it", because=str(error))
        owners = [other for other, can in enumerate(island.all_gather(reaches)) if can]
        self._take_share(owners, 0)
        self._meet("join")  # by which the others hear that the learner is attached
        fragment_count = island.tell(0, len(self._exchange.layouts))
        for number in range(1, min(len(owners), fragment_count)):
            self._take_share(owners, number)
        self._parameters.take_changed()
        self._meet("join")
        self._is_joining = False

    def _shared(self, options: LearnerOptions) -> str:
        """Returns the target; of a store, the syncer that the first rank on this rank's machine has started."""
        if not is_store(options["target"]):
            return options["target"]
        machines = self._island.all_gather(socket.gethostname())
        first = machines.index(machines[self._island.rank])
        own = self._reached(options) if first == self._island.rank else ""
        return self._island.all_gather(own)[first]

    def _take_share(self, owners: Sequence[int], number: int) -> None:
        """Has one of the owners attach, and exchange its share of the fragments from now on."""

        def attach() -> None:
            self._attach(self._parameters, number=number, count=len(owners))
            self._boundary.exchanges = True

        self._boundary.turn(owners[number], attach)

    # What the training loop calls.

    def step(self, tokens: int, loss: float | None, leave_status: int | None) -> tuple[tuple[str, ...], int | None]:
        """Reports one finished step: of its tokens, and losses, this rank's.

        Returns:
            The fragments that it changed, and the status with which all ranks are to leave now, if one of them is.
        """
        with self._together():
            tokens = whole_number(tokens, "tokens")
            if tokens < 0:
                raise ValueError(f"a rank trains on no fewer than 0 tokens. tokens={tokens}")
            self._exchange.check_weights()
            own = tokens, None if loss is None else float(loss), leave_status
            told = [report.told for report in self._meet("step", own)]
            losses = [loss for _, loss, _ in told if loss is not None]
            statuses = [status for *_, status in told if status is not None]
            self._exchange.step(sum(tokens for tokens, *_ in told), sum(losses) / len(losses) if losses else None)
            self._has_agreed = bool(statuses)
            return self._parameters.take_changed(), max(statuses, default=None)

    def flush(self, timeout_s: float, *, is_last: bool) -> bool:
        """Sends all unsent work, of all ranks."""
        with self._together():
            self._call = "flush"
            return super().flush(timeout_s, is_last=is_last)

    def leave(self, timeout_s: float, *, load_merged: bool) -> LastWork:
        """Sends the last work and leaves the run; with `load_merged` all ranks get the run's weights, or none does."""
        if self._island.has_left:
            return self._last_work
        with self._together():
            self._call = "leave"
            exchange, is_loaded = self._exchange, None
            is_done = (lambda: exchange.is_settled) if load_merged else (lambda: exchange.is_decided)
            is_flushed = self._flush(is_done, timeout_s, is_last=True)
            if load_merged and (is_loaded := is_flushed):
                turns = [self._boundary.turn(rank, exchange.load_merged) for rank in range(self._island.size)]
                is_loaded = False not in turns
            ends = [report.told for report in self._meet("leave", (exchange.last_work, is_loaded))]
            work = reduce(or_, (last_work for last_work, _ in ends))
            is_loaded = all(loaded for _, loaded in ends) if load_merged else None
            self._work_of_all = replace(work, is_loaded=is_loaded)
        self.close()
        self._last_work = self._work_of_all
        return self._last_work

    def count_from(self, step_count: int, token_count: int) -> None:
        """Counts on from there, as every rank must."""
        with self._together():
            super().count_from(step_count, token_count)
            self._meet("count_from")

    def merged_weights(self) -> dict[str, NDArray[np.float32]]:
        """Returns copies of the run's own weights at the first rank, and nothing at others; every rank calls it."""
        with self._together():
            self._meet("merged_weights")
            island, own = self._island, super().merged_weights()
            merged = dict(own) if island.rank == 0 else {}
            for rank, shapes in enumerate(island.all_gather({name: array.shape for name, array in own.items()})):
                for name, shape in shapes.items() if rank else ():
                    if island.rank == 0:
                        merged[name] = np.empty(shape, np.float32)
                        island.receive(torch.from_numpy(merged[name]), rank)
                    elif island.rank == rank:
                        island.send(torch.from_numpy(own[name]), 0)
            return merged

    def may_send_after(self, kind: type[BaseException] | None, *, is_told: bool) -> bool:
        """Whether all ranks leave now, by exceptions of this kind and after the same calls; waits 5 s for that."""
        if kind is None or self._has_agreed:
            return True
        is_asked = issubclass(kind, SystemExit | KeyboardInterrupt) and not self._island.has_left
        return is_asked and self._island.agree(kind.__name__, _AGREE_S)

    def close(self, error: BaseException | None = None) -> None:
        """Leaves the run; the other ranks learn of `error`. Idempotent."""
        if error is not None:
            self._island.leave(error)
        try:
            if self._running is not None:
                super().close()
        finally:
            self._closing.close()
            self._island.leave()

    def _say_left(self, work: LastWork) -> None:
        if self._island.rank == 0:
            super()._say_left(work if self._work_of_all is None else self._work_of_all)

    @property
    def stats(self) -> Stats:
        """What the training loop may ask, as of the last meeting; the same at all ranks."""
        own, total = self._exchange.stats, sum_of([report.stats for report in self._reports])
        step_count = own.step_count - total.step_count  # since the meeting
        share = share_of_plan(own.token_count - total.token_count, total.planned_token_count)
        return replace(
            total,
            step_count=own.step_count,
            token_count=own.token_count,
            unsent_step_count=total.unsent_step_count + step_count,
            loss=own.loss,
            progress=None if share is None or total.progress is None else min(1.0, total.progress + share),
            failure=self._failure or total.failure,
        )

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Makes an error of one rank an error of all; the island is over then."""
        self._island.process.check()
        try:
            yield
        except BaseException as error:
            if isinstance(error, SkerryError):
                self._failure = error
            self.close(error)
            raise

    # Meetings.

    def _meet_again(self, is_over: bool, is_late: bool) -> tuple[bool, bool]:  # noqa: FBT001 - a callback
        told = [report.told for report in self._meet(self._call, (is_over, is_late))]
        return all(over for over, _ in told), told[0][1]

    def _meet(self, call: str, told: Any = None) -> list[RankReport]:
        """Returns what all ranks say at this call.

        Raises:
            StopExchangingError: RANKS_DIFFER.
        """
        exchange, loop = self._exchange, self._thread.loop
        own = RankReport(
            call,
            exchange.stats,
            self._boundary.waiting,
            self._parameters.take_sums(),
            [self._heard.popleft() for _ in range(len(self._heard))],
            told,
        )
        self._reports = reports = self._island.all_gather(own)
        self._check(reports)
        self._boundary.take_turns([report.waiting for report in reports])
        if self._island.rank and (self._is_joining or self._boundary.exchanges):
            loop.call_soon_threadsafe(exchange.hear, reports[0].heard)
        failures = [report.stats.failure for report in reports if report.stats.failure]
        if failures and own.stats.failure is None:
            loop.call_soon_threadsafe(exchange.stop, failures[0])
        # Where weights of one rank are not finite, all are restored at one step, since gradients spread that.
        is_wanted = any(report.waiting.has_common_work for report in reports)
        if is_wanted and own.waiting.has_common_work is False and (not self._restoring or self._restoring.done()):
            self._restoring = self._thread.start(exchange.restore_all())
        return reports

    def _check(self, reports: Sequence[RankReport]) -> None:
        calls = defaultdict(list)
        for rank, report in enumerate(reports):
            calls[report.call].append(rank)
        if len(calls) > 1:
            raise StopExchangingError(
                "RANKS_DIFFER",
                f"the ranks of an island must make the same calls in the same order. ranks={dict(calls)}",
            )
        if differing := self._parameters.differing([report.sums for report in reports]):
            raise StopExchangingError(
                "RANKS_DIFFER",
                "the ranks' weights differ: after the last adoption they had to be equal. Train all ranks with the "
                "same optimizer and settings, and with gradients that are averaged over the ranks "
                "(DistributedDataParallel, fully_shard); ranks of tensor parallelism read the same batches. differing "
                f"from the first rank that holds the same weights={differing}",
            )
