"""Follows a run: its merged weights, version after version, for evaluation, export and serving."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from skerry.errors import SkerryError, error_of, is_transient
from skerry.exchange.adopt import Pulled
from skerry.exchange.settings import check_timeout, whole_number
from skerry.net.retry import RetrySettings
from skerry.net.tls import Insecure, Tls
from skerry.runs.client import RunsClient
from skerry.runtime.clock import SystemClock, ThreadClock
from skerry.runtime.identifiers import system_random
from skerry.runtime.logs import get_logger
from skerry.v1 import types_pb2 as v1
from skerry.v1.types_pb2 import Event, MetricsReport, Run
from skerry.wire import messages
from skerry.wire.layout import FragmentLayout, check_name

_log = get_logger(__name__)

_PAUSES: Final = RetrySettings(first_wait_s=0.5)
# What was collected or damaged between two calls is not there again in the newest version.
_OUTDATED: Final = frozenset({"VERSION_NOT_FOUND", "PLAN_EXPIRED", "CORRUPT_DOWNLOAD"})


@dataclass(frozen=True)
class Version:
    """A run's merged weights at one position of its log.

    `position` is that of the entry that made the newest of `versions`, which has the version of each fragment, so two
    followers see the same weights under the same position. `run` is the run as it was when it was asked for.
    """

    run: Run
    position: int
    versions: Mapping[str, int]
    _pieces: tuple[tuple[FragmentLayout, NDArray[np.float32]], ...]  # each fragment with its weights, (numel,)
    _report: Callable[[int, Mapping[str, float]], MetricsReport]

    def arrays(self) -> dict[str, NDArray[np.float32]]:
        """Returns the tensors by name, in the order of the run's fragments; they can't be written to."""
        return {name: values for layout, flat in self._pieces for name, values in layout.pieces(flat)}

    def state_dict(self) -> dict[str, Any]:
        """Returns copies as torch's float32 tensors for `load_state_dict`, which casts them to the model's types."""
        import torch

        return {name: torch.from_numpy(values.copy()) for name, values in self.arrays().items()}

    def report(self, **metrics: float) -> MetricsReport:
        """Returns the report that the follower's `judge` makes of this version, as the run keeps it.

            version.report(held_out_loss=evaluate(version.state_dict()))

        Names are in lower case. A value that is not finite counts as the worst possible. A report needs the certificate
        of an admin, or of the learner whose id is the judge's name.

        Raises:
            SkerryError: the report was refused, or calls have failed for the follower's `patience_s`.
        """
        return self._report(self.position, metrics)


class Follower:
    """The merged weights of a run as an iterable: the newest version, and each that is made while it is followed.

        for version in Follower("syncer.example:443", "gemma-12b", every=100):
            print(version.position, evaluate(version.state_dict()))

    A version here is one of the whole model: the newest versions of all fragments at one position of the log. The
    iteration always goes on with the newest. What was made while the caller worked is passed over, so that a slow
    caller is never behind. It ends after the last version of a run that is closed. Only updates are downloaded once the
    first version is there.

    A follower reads, so a reader's certificate is enough, unless it reports metrics (`Version.report`). It belongs to
    one thread, holds the weights as float32, and begins a second iteration where the first stopped.

    Args:
        target: the syncer, or several replicas separated by commas, of which any answers; or the URL of a store, as for
            `Learner`.
        run: the run's name. A run that does not exist yet is waited for.
        every: the least number of versions of fragments between two versions of the model. A model of P fragments has P
            of them in about H steps.
        judge: the name under which it reports metrics.
        tls: as for `Learner`.
        patience_s: how long calls may fail before iterating raises the last error.
        clock: for tests.

    Raises:
        ValueError: an argument can't be right.
        SkerryError: no syncer can serve the store that `target` names.
    """

    def __init__(
        self,
        target: str,
        run: str,
        *,
        every: int = 1,
        judge: str = "judge",
        tls: Tls | Insecure | None = None,
        patience_s: float = 300.0,
        clock: ThreadClock | None = None,
    ) -> None:
        check_timeout(patience_s, "patience_s")
        if whole_number(every, "every") < 1:
            raise ValueError(f"every must be at least 1. every={every}")
        self._name = check_name(run, "run")
        self._every = every
        self._judge = check_name(judge, "judge")
        self._patience_s = patience_s
        self._clock: ThreadClock = clock or SystemClock()
        self._failure_count = 0  # in a row
        self._uid: str | None = None
        self._held: dict[str, tuple[Pulled, int]] = {}  # by fragment, with the position that made it
        self._count = -1  # versions of fragments in the last version of the model
        self.client: Final = RunsClient(target, tls=tls)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections. Idempotent."""
        self.client.close()

    def __iter__(self) -> Iterator[Version]:
        """Yields versions until the run is closed.

        Raises:
            SkerryError: a call was refused, or calls have failed for `patience_s`.
        """
        while (version := self._next()) is not None:
            yield version

    def _report(self, position: int, metrics: Mapping[str, float]) -> MetricsReport:
        return self.client.report_metrics(
            self._name, metrics, judge=self._judge, position=position, patience_s=self._patience_s
        )

    def _next(self) -> Version | None:
        """Waits for the next version; None: the run is closed."""
        self._failure_count, failing_since_s = 0, 0.0
        while True:
            try:
                run = self.client.get_run(self._name, uid=self._uid).run
                self._uid = run.uid
                is_closed = run.status == v1.RUN_STATUS_CLOSED
                new_count = sum(version.version for version in run.versions) - self._count
                if new_count >= self._every or self._count < 0 or (is_closed and new_count):
                    return self._pulled(run)
                if is_closed:
                    return None
                self._wait(run, self._every - new_count)
            except SkerryError as error:
                is_awaited = self._uid is None and error.reason in {"RUN_NOT_FOUND", "RUN_DRAFT"}
                may_pass = is_awaited or is_transient(error) or error.reason in _OUTDATED
                now_s = self._clock.monotonic_s()
                if self._failure_count == 0:
                    failing_since_s = now_s
                    _log.warning("following failed and will be tried again", run=self._name, because=str(error))
                if not may_pass or now_s - failing_since_s > self._patience_s:
                    raise
                self._failure_count += 1
                self._clock.block(_PAUSES.wait_s(self._failure_count, error, system_random()))

    def _wait(self, run: Run, missing_count: int) -> None:
        """Returns when so many versions of fragments are made, or the run is rolled back or closed."""
        for message in self.client.watch(self._name, uid=run.uid, after_position=run.position):
            self._failure_count = 0
            kind = message.WhichOneof("kind") if isinstance(message, Event) else None
            missing_count -= kind == "version_committed"
            if missing_count <= 0 or kind in {"rolled_back", "status_changed"}:
                return
        raise error_of("UNREACHABLE", "the syncer ended the stream")  # as a replica does that drains

    def _pulled(self, run: Run) -> Version:
        """Downloads what is new, and takes note of it once all of it is here."""
        layouts, _ = messages.layouts_from_messages(run.tensors, run.fragments)
        versions = {version.fragment: version.version for version in run.versions}
        for layout in layouts:
            version = versions[layout.name]
            held, _ = self._held.get(layout.name, (None, 0))
            if held is not None and held.version == version:
                continue
            try:
                pulled = self.client.pull_fragment(run, layout, held=held)
            except SkerryError as error:
                if error.reason in _OUTDATED:
                    self._held.pop(layout.name, None)  # the next try begins with a snapshot
                raise
            pulled.weights.flags.writeable = False
            record = next(self.client.list_versions(self._name, layout.name, before_version=version + 1))
            self._held[layout.name] = pulled, record.position
        self._count = sum(versions.values())
        pieces = tuple((layout, self._held[layout.name][0].weights) for layout in layouts)
        return Version(run, max(position for _, position in self._held.values()), versions, pieces, self._report)
