"""Administers runs from a script or a command: create, look at, steer, roll back, watch, close, delete."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from skerry.errors import RefusedError, is_transient
from skerry.exchange.adopt import Pulled
from skerry.exchange.join import NewRun, create_run
from skerry.exchange.pull import pull_newest
from skerry.exchange.session import Calls, Reader, policy_of
from skerry.exchange.settings import check_policy, check_timeout
from skerry.model.fragment_plan import FragmentPlan, plan_fragments
from skerry.net.grpc_transport import GrpcTransport
from skerry.net.loop_thread import LoopThread
from skerry.net.own_syncer import reached
from skerry.net.retry import Retry, RetrySettings
from skerry.net.tls import Insecure, Tls, check_target
from skerry.net.transport import Method
from skerry.runtime.identifiers import SystemEntropy, system_random
from skerry.runtime.workers import InlineWorkers, ThreadWorkers
from skerry.v1 import capabilities_pb2, exchange_pb2, runs_pb2, types_pb2
from skerry.v1.capabilities_pb2 import GetCapabilitiesResponse
from skerry.v1.exchange_pb2 import WatchStart
from skerry.v1.runs_pb2 import Contribution, GetRunResponse, VersionRecord
from skerry.v1.types_pb2 import Event, FragmentVersion, LearnerStatus, MetricsReport, Run
from skerry.wire import messages
from skerry.wire.layout import FragmentLayout, TensorSpec
from skerry.wire.policy import Policy

R = TypeVar("R")

_PAGE_SIZE: Final = 100
# A person waits for the answer. Calls are repeated a few times if the server asks for it, or if it is gone and there
# are other replicas, and not at all if no replica answers.
_RETRY: Final = RetrySettings(attempt_count=3, longest_wait_s=2.0)
_HOPELESS_WITH_OTHERS: Final = frozenset({"TIMEOUT", "UNAUTHENTICATED", "STORE_FULL"})
_HOPELESS: Final = _HOPELESS_WITH_OTHERS | {"UNREACHABLE", "TLS_FAILED"}
_PROGRESS_S: Final = 0.5


class RunsClient:
    """Calls `skerry.v1.Runs` of the syncer at `target`, waiting at most `timeout_s` for each answer.

    `target` is host:port, or several replicas separated by commas (see `skerry.net.replicas`), or the URL of a store.
    `target` and `tls` are as for `Learner`.

    Answers are messages of `skerry.v1`, whose .proto files specify their fields; the layout of a run is never packed.

    Synchronous, for one thread at a time; a context manager. Every method raises SkerryError if the server refuses or
    does not answer. Log positions in answers are remembered and sent along, so that no replica answers from an older
    state.

    Raises:
        ValueError: `target` is no address, `timeout_s` no time, or the files of `tls` can't be used.
        SkerryError: no syncer can serve the store that `target` names.
    """

    def __init__(self, target: str, *, tls: Tls | Insecure | None = None, timeout_s: float = 30.0) -> None:
        check_timeout(timeout_s, "timeout_s")
        check_target(target, tls)
        self._entropy = SystemEntropy()
        self._seen: dict[str, int] = {}  # position by run uid
        self._uids: dict[str, str] = {}  # newest uid seen by name
        jitter = system_random()
        with ExitStack() as opened:
            address = reached(target, opened, timeout_s=timeout_s)
            self._thread = LoopThread("skerry-runs")
            self._transport = self._thread.call(lambda: GrpcTransport(address, tls=tls, jitter=jitter))
            self._closing = opened.pop_all()
        retry = Retry(_RETRY, jitter, self._is_worth_it)
        self._calls = Calls(self._transport, retry, timeout_s=timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection. Idempotent."""
        if not self._thread.is_over:
            self._thread.run(self._transport.close())
            self._thread.close()
            self._closing.close()

    def capabilities(self) -> GetCapabilitiesResponse:
        """Returns the server's version, codecs and limits."""
        return self._call(lambda stubs: stubs.capabilities.GetCapabilities, capabilities_pb2.GetCapabilitiesRequest())

    def get_run(self, name: str, *, uid: str | None = None) -> GetRunResponse:
        """Returns a run and its learners; with `uid`, only if the name is still that run's."""
        request = runs_pb2.GetRunRequest(name=name, run_uid=uid or "")
        if uid is not None:
            request.seen_position = self._seen.get(uid, 0)
        response = self._call(lambda stubs: stubs.runs.GetRun, request)
        self._seen_run(response.run)
        return response

    def get_policy(self, name: str) -> Policy:
        """Returns a run's policy."""
        return policy_of(self.get_run(name).run.policy, Policy())

    def list_runs(self) -> list[Run]:
        """Returns every committed run, by name."""
        runs: list[Run] = []
        request = runs_pb2.ListRunsRequest(page_size=_PAGE_SIZE)
        while True:
            response = self._call(lambda stubs: stubs.runs.ListRuns, request)
            runs.extend(map(_unpacked, response.runs))
            if not response.next_page_token:
                return runs
            request.page_token = response.next_page_token

    def create_run(
        self,
        name: str,
        arrays: Mapping[str, NDArray[np.floating[Any]]],
        *,
        policy: Policy | None = None,
        fragments: Sequence[FragmentLayout] | None = None,
    ) -> Run:
        """Returns a new run whose version 0 is exactly `arrays`, as float32.

        Without `fragments` the plan is made here, and embeddings are merged by the mean; with `fragments` the policy
        alone decides how they are merged.

        Raises:
            RunExistsError: the name is taken.
            ValueError: no arrays.
        """
        check_policy(policy)
        specs = [TensorSpec(tensor, tuple(array.shape)) for tensor, array in arrays.items()]
        plan = plan_fragments(specs) if fragments is None else FragmentPlan(tuple(fragments))
        dtypes = {tensor: str(array.dtype) for tensor, array in arrays.items()}
        new = NewRun(name, self._entropy.hex_id(), plan, dtypes, policy or Policy())

        def weights_of(layout: FragmentLayout) -> NDArray[np.float32]:
            return np.concatenate([np.asarray(arrays[t.name], np.float32).reshape(-1) for t in layout.tensors])

        return self._seen_run(self._thread.run(create_run(self._calls, InlineWorkers(), new, weights_of)))

    def set_policy(self, name: str, policy: Policy, *, base: Policy | None = None) -> Policy:
        """Returns the run's new policy: the fields in which `policy` differs from `base` change, the others stay.

            policy = client.get_policy("demo")
            client.set_policy("demo", replace(policy, quorum_count=2), base=policy)

        Without `base` every field is set.
        """
        check_policy(policy)
        request = runs_pb2.SetPolicyRequest(
            request_id=self._entropy.hex_id(), name=name, policy=_changes(base, policy), **self._known(name)
        )
        run = self._seen_run(self._call(lambda stubs: stubs.runs.SetPolicy, request).run)
        return policy_of(run.policy, Policy())

    def eject(self, name: str, learner_id: str) -> LearnerStatus:
        """Returns a learner once it is ejected from the run, until it is readmitted.

        From then on every replica refuses it, and no delta of it is merged: those that it has sent expire. What was
        merged before stays.

        Raises:
            RefusedError: LEARNER_NOT_FOUND: no learner of that id ever attached.
        """
        return self._set_ejection(name, learner_id, is_ejected=True)

    def readmit(self, name: str, learner_id: str) -> LearnerStatus:
        """Returns a learner once it may attach again; raises as `eject` does."""
        return self._set_ejection(name, learner_id, is_ejected=False)

    def _set_ejection(self, name: str, learner_id: str, *, is_ejected: bool) -> LearnerStatus:
        request = runs_pb2.SetEjectionRequest(
            request_id=self._entropy.hex_id(),
            name=name,
            learner_id=learner_id,
            is_ejected=is_ejected,
            **self._known(name),
        )
        response = self._call(lambda stubs: stubs.runs.SetEjection, request)
        self._seen_run(response.run)
        return response.learner

    def list_versions(self, name: str, fragment: str, *, before_version: int = 0) -> Iterator[VersionRecord]:
        """Yields a fragment's versions, newest first, a page at a time as they are asked for."""
        request = runs_pb2.ListVersionsRequest(
            name=name, fragment=fragment, page_size=_PAGE_SIZE, before_version=before_version, **self._known(name)
        )
        while records := self._call(lambda stubs: stubs.runs.ListVersions, request).versions:
            yield from records
            request.before_version = records[-1].version.version
            if request.before_version == 0:
                return

    def run_at(self, name: str, position: int) -> Run:
        """Returns the run with the versions that it had at a position of its log.

        Raises:
            RefusedError: VERSION_NOT_FOUND: the log has no such position, or the run had no weights then.
        """
        run = self.get_run(name).run
        versions: list[FragmentVersion] = []
        for fragment in run.fragments:
            records = (record for record in self.list_versions(name, fragment.name) if record.position <= position)
            if position > run.position or (newest := next(records, None)) is None:
                raise RefusedError(
                    "VERSION_NOT_FOUND",
                    f"the run has no weights at that position. position={position}, end={run.position}",
                )
            versions.append(newest.version)
        del run.versions[:]
        run.versions.extend(versions)
        run.position = position
        return run

    def pull(
        self, run: str | Run, *, progress: Callable[[int, int], None] | None = None
    ) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Yields the name and the values of each tensor, as float32, in the order of the run's fragments.

            weights = dict(client.pull("demo"))

        Of a name the newest weights, of a `Run` those of its versions. A tensor is a view of its fragment, and one
        fragment is held at a time. `progress` is called now and then with (elements received, in all).
        """
        run = self.get_run(run).run if isinstance(run, str) else run
        layouts, _ = messages.layouts_from_messages(run.tensors, run.fragments)
        total, done = sum(layout.numel for layout in layouts), 0

        def told(count: int) -> None:
            if progress is not None:
                progress(done + count, total)

        for layout in layouts:
            pulled = self.pull_fragment(run, layout, progress=told)
            yield from layout.pieces(pulled.weights)
            del pulled  # while the next is received
            done += layout.numel

    def pull_fragment(
        self,
        run: Run,
        layout: FragmentLayout,
        *,
        held: Pulled | None = None,
        progress: Callable[[int], None] = lambda _: None,
    ) -> Pulled:
        """Returns a fragment in the version that `run` names, by way of updates to `held` where there are some.

        `held` is a version that an earlier call returned, and stays as it is. `progress` is called now and then with
        the elements received.
        """
        targets = {version.fragment: version.version for version in run.versions}
        start: dict[str, Any] = {} if held is None else {"version": held.version, "weights": held.weights}
        retry = replace(self._calls.retry, settings=RetrySettings(), is_worth_it=is_transient)
        workers = ThreadWorkers(2)
        try:
            reader = self._thread.call(lambda: Reader(replace(self._calls, retry=retry), workers, run.name))
            reader.run_uid, reader.position = run.uid, run.position
            pulling = self._thread.start(pull_newest(reader, layout, target_version=targets[layout.name], **start))
            try:
                while not wait([pulling], _PROGRESS_S).done:
                    progress(min(layout.numel, reader.tally.bytes_down // 4))
                return pulling.result()
            finally:
                pulling.cancel()
                del pulling  # a traceback would keep its weights
        finally:
            workers.close()

    def roll_back(self, name: str, target_position: int, *, progress: Callable[[int, int], None] | None = None) -> Run:
        """Returns the run after every fragment got the content that it had at `target_position`.

        However long it takes, `progress` is called every few seconds with (fragments stored, in all). If it raises, or
        this process ends, the run stays as it is.
        """
        request = runs_pb2.RollBackRequest(
            request_id=self._entropy.hex_id(),
            name=name,
            target_position=target_position,
            **self._known(name),
        )
        while True:
            response = self._call(lambda stubs: stubs.runs.RollBack, request)
            run = self._seen_run(response.run)
            if not response.HasField("progress"):
                return run
            if progress is not None:
                progress(response.progress.stored_count, response.progress.fragment_count)

    def report_metrics(
        self, name: str, metrics: Mapping[str, float], *, judge: str, position: int, patience_s: float = 30.0
    ) -> MetricsReport:
        """Returns the report that a judge makes of the versions that the run had at a position of its log.

            client.report_metrics("demo", {"held_out_loss": 3.21}, judge="eval", position=run.position)

        A value that is not finite counts as the worst possible. With certificates a learner judges by its own id. A
        report that fails is repeated for `patience_s` where that may help.
        """
        request = runs_pb2.ReportMetricsRequest(
            request_id=self._entropy.hex_id(),
            name=name,
            position=position,
            judge=judge,
            metrics=metrics,
            **self._known(name),
        )
        retry = replace(self._calls.retry, settings=RetrySettings(attempt_count=None), is_worth_it=is_transient)

        def report() -> Awaitable[runs_pb2.ReportMetricsResponse]:
            return self._calls.ask(lambda stubs: stubs.runs.ReportMetrics, request)

        return self._thread.run(retry.call(report, timeout_s=patience_s)).report

    def close_run(self, name: str) -> Run:
        """Returns the run once it is closed and every accepted delta has its final fate."""
        request = runs_pb2.CloseRunRequest(name=name, **self._known(name))
        return self._seen_run(self._call(lambda stubs: stubs.runs.CloseRun, request).run)

    def delete_run(self, name: str, uid: str) -> None:
        """Takes the name away from the run, if it still has this uid."""
        self._call(lambda stubs: stubs.runs.DeleteRun, runs_pb2.DeleteRunRequest(name=name, run_uid=uid))
        self._uids.pop(name, None)

    def watch(self, name: str, *, uid: str = "", after_position: int = 0) -> Iterator[WatchStart | Event]:
        """Yields the run as it is now, then its events; raises SkerryError when the stream breaks.

        With a uid it refuses another run that has the name now.
        """
        request = exchange_pb2.WatchRequest(run=name, run_uid=uid, after_position=after_position)
        responses = self._thread.call(lambda: self._transport.watch(request))
        try:
            while (response := self._thread.run(_next(responses))) is not None:
                if response.HasField("start"):
                    _unpacked(response.start.run)
                    yield response.start
                yield from response.events
        finally:
            if not self._thread.is_over:
                self._thread.run(responses.aclose())

    def account(self, name: str) -> list[Contribution]:
        """Returns what each learner and each organisation contributed to a run's newest versions, most weight first.

        The rows of organisations have no `learner_id`.
        """
        return list(self.get_run(name).contributions)

    def _is_worth_it(self, error: BaseException) -> bool:
        hopeless = _HOPELESS_WITH_OTHERS if self._transport.has_others else _HOPELESS
        return is_transient(error) and error.reason not in hopeless

    def _known(self, name: str) -> dict[str, Any]:
        """Returns uid and position of the run that this client last saw under `name`."""
        uid = self._uids.get(name)
        return {} if uid is None else {"run_uid": uid, "seen_position": self._seen[uid]}

    def _seen_run(self, run: Run) -> Run:
        """Returns the run, and remembers its uid and position."""
        self._uids[run.name] = run.uid
        self._seen[run.uid] = max(run.position, self._seen.get(run.uid, 0))
        return _unpacked(run)

    def _call(self, method: Method[R], request: object) -> R:
        return self._thread.run(self._calls.retry.call(lambda: self._calls.ask(method, request)))


def _unpacked(run: Run) -> Run:
    try:
        messages.unpack_layout(run)
    except ValueError as error:
        raise RefusedError("BAD_ANSWER", str(error)) from error
    return run


def _changes(base: Policy | None, policy: Policy) -> types_pb2.Policy:
    """Returns what SetPolicy is asked for, so that `policy` comes of `base`."""
    message = messages.policy_to_message(policy, has_derived=False)
    if base is None:
        return message
    old = messages.policy_to_message(base, has_derived=False)
    for field, value in old.ListFields():
        if getattr(message, field.name) == value:
            message.ClearField(field.name)  # type: ignore[arg-type]  # the name of any field
    pins, old_pins = set(policy.pinned_positions), set(base.pinned_positions)
    message.pinned_positions[:] = [*sorted(pins - old_pins), *(-pin for pin in sorted(old_pins - pins))]
    for fragment in old.merge_by_fragment:
        if fragment not in policy.merge_by_fragment:
            message.merge_by_fragment[fragment] = types_pb2.MERGE_RULE_UNSPECIFIED  # takes the rule away
    return message


async def _next(responses: AsyncGenerator[exchange_pb2.WatchResponse, None]) -> exchange_pb2.WatchResponse | None:
    return await anext(responses, None)
