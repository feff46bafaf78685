"""A learner of NumPy arrays: what the training thread calls. The exchange runs in a background thread."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final, Required, Self, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from skerry.algorithm.rebase import Trained
from skerry.errors import SkerryError, is_transient
from skerry.exchange.boundary import Boundary, Post
from skerry.exchange.loop import ExchangeLoop
from skerry.exchange.session import Calls
from skerry.exchange.settings import ExchangeSettings, check_policy
from skerry.model.interface import ArrayParameters, Parameters
from skerry.net.forks import OwnProcess
from skerry.net.grpc_transport import GrpcTransport
from skerry.net.handshakes import check_certificate
from skerry.net.loop_thread import LoopThread
from skerry.net.own_syncer import reached
from skerry.net.retry import Retry, RetrySettings
from skerry.net.tls import Insecure, Tls, check_target
from skerry.net.transport import LANE_COUNT
from skerry.runtime.clock import StepClock, SystemClock
from skerry.runtime.identifiers import SystemEntropy, new_learner_id, system_random
from skerry.runtime.logs import get_logger
from skerry.runtime.workers import ThreadWorkers
from skerry.stats import LastWork, Stats
from skerry.wire.policy import Policy

_log = get_logger(__name__)

# How long leaving the context waits for the last work to be sent.
EXIT_FLUSH_TIMEOUT_S: Final = 10.0
# Ending the exchange takes less time; the bound keeps a defect from holding the process alive.
_END_TIMEOUT_S: Final = 5.0


class LearnerOptions(TypedDict, total=False):
    """The arguments of every learner, which `ArrayLearner` explains."""

    target: Required[str]
    run: Required[str]
    learner_id: str | None
    region: str
    create: bool
    policy: Policy | None
    planned_token_count: int | None
    fragment_count: int | None
    allow_other_frozen: bool | Collection[str]
    connect_timeout_s: float
    tls: Tls | Insecure | None


class SingleProcess:
    """What exchanges for a learner: the exchange on an event loop in a thread of its own, with workers beside it.

    The methods are those of the learner; `ManyRanks` has them for the ranks of several processes.
    """

    _running: Future[None] | None = None  # once it is attached

    def __init__(self, parameters: Parameters, options: LearnerOptions) -> None:
        """Attaches to the run and loads its newest weights."""
        self._closing = ExitStack()
        try:
            self._open(parameters, settings_of(**options), options)
            self._attach(parameters)
        except BaseException:
            self._closing.close()
            raise
        atexit.register(self._say_forgotten)
        self._closing.callback(atexit.unregister, self._say_forgotten)

    def _open(
        self,
        parameters: Parameters,
        settings: ExchangeSettings,
        options: LearnerOptions,
        *,
        boundary: Callable[[StepClock, Post], Boundary] = Boundary,
        lane_count: int = LANE_COUNT,
        **between_ranks: Any,
    ) -> None:
        """Makes the exchange, and what it needs; calls nobody yet. `between_ranks` are arguments of `ExchangeLoop`."""
        self.learner_id = settings.learner_id
        self._last_work = LastWork()
        target = self._reached(options)
        workers = ThreadWorkers(_worker_count(), initializer=parameters.enter_worker)
        self._closing.callback(workers.close)
        self._thread = LoopThread(f"skerry-{settings.learner_id}")
        self._closing.callback(self._thread.close)
        snapshot_bytes = 4 * sum(tensor.numel for tensor in parameters.tensors)
        wanted = min(lane_count, -(-snapshot_bytes // Calls.lane_bytes))
        transport = self._thread.call(
            lambda: GrpcTransport(target, tls=options.get("tls"), jitter=system_random(), lane_count=wanted)
        )
        self._closing.callback(lambda: self._thread.run(transport.close()))
        self._boundary = boundary(SystemClock(), self._thread.loop.call_soon_threadsafe)
        self._exchange = ExchangeLoop(
            Calls(transport, Retry(RetrySettings(), system_random(), is_transient), lane_count=lane_count),
            parameters,
            settings,
            workers=workers,
            entropy=SystemEntropy(),
            boundary=self._boundary,
            **between_ranks,
        )

    def _reached(self, options: LearnerOptions) -> str:
        """Returns what to call: the target, or this process's own syncer over the store that it names."""
        timeout_s = settings_of(**options).connect_timeout_s
        return reached(options["target"], self._closing, is_new=options.get("create", False), timeout_s=timeout_s)

    def _attach(self, parameters: Parameters, **share: int) -> None:
        self._thread.run(self._exchange.join(**share))
        parameters.synchronize()  # training comes after the weights that were loaded
        self._running = self._thread.start(self._exchange.run())
        self._thread.run(self._exchange.wait_attached())

    @property
    def stats(self) -> Stats:
        """What the training loop may ask; of several ranks, all have the same."""
        return self._exchange.stats

    def step(self, tokens: int, loss: float | None, leave_status: int | None) -> tuple[tuple[str, ...], int | None]:
        """Counts a step; returns the fragments that it changed, and with which status to leave now, if at all.

        `leave_status` is what `leave_soon` was told.
        """
        return self._exchange.step(tokens, loss), leave_status

    def flush(self, timeout_s: float, *, is_last: bool) -> bool:
        """Sends all unsent work."""
        return self._flush(lambda: self._exchange.is_flushed, timeout_s, is_last=is_last)

    def _flush(self, is_done: Callable[[], bool], timeout_s: float, *, is_last: bool) -> bool:
        self._exchange.check_weights()
        self._thread.loop.call_soon_threadsafe(lambda: self._exchange.flush(is_last=is_last))
        try:
            return self._boundary.serve(is_done, timeout_s)
        finally:
            self._thread.loop.call_soon_threadsafe(self._exchange.end_flush)

    def leave(self, timeout_s: float, *, load_merged: bool) -> LastWork:
        """Sends the last work and leaves the run. Idempotent."""
        if self._thread.is_over:
            return self._last_work
        is_loaded: bool | None = None
        try:
            if load_merged:
                is_loaded = False
                is_settled = self._flush(lambda: self._exchange.is_settled, timeout_s, is_last=True)
                is_loaded = is_settled and self._exchange.load_merged()
            else:
                self._flush(lambda: self._exchange.is_decided, timeout_s, is_last=True)
        finally:
            self.close()
            self._last_work = replace(self._last_work, is_loaded=is_loaded)
        return self._last_work

    def count_from(self, step_count: int, token_count: int) -> None:
        """Has counts go on after those of an earlier process."""
        self._exchange.count_from(Trained(step_count, token_count))

    def merged_weights(self) -> dict[str, NDArray[np.float32]]:
        """Returns copies of the run's own weights."""
        return self._exchange.merged_weights()

    def may_send_after(self, kind: type[BaseException] | None, *, is_told: bool) -> bool:
        """Whether work is whole when the context ends by an exception of this kind; `is_told`: to leave soon.

        Work that a failed step may have damaged is not sent.
        """
        return kind is None or is_told or issubclass(kind, SystemExit | KeyboardInterrupt)

    def close(self, error: BaseException | None = None) -> None:
        """Ends the exchange without sending anything, and says which steps the run does not have. Idempotent.

        `error` is why, if the training loop failed.
        """
        if self._thread.is_over:
            return
        self._last_work = self._exchange.last_work
        self._say_left(self._last_work)
        with self._closing:
            self._thread.run(self._exchange.leave())
            if self._running is not None:
                wait([self._running], _END_TIMEOUT_S)

    def _say_left(self, work: LastWork) -> None:
        is_fine = work or (self.stats.is_closed and not work.dropped_step_count)
        facts = {name.replace("_step_count", "_steps"): value for name, value in vars(work).items() if value}
        (_log.info if is_fine else _log.warning)(
            "left the run" if is_fine else "left the run, which does not have all of the last work",
            **facts,
        )

    def _say_forgotten(self) -> None:
        # It is too late to send them: Python lets no thread begin work once the main thread has ended.
        stats = self.stats
        if (lost := stats.unsent_step_count) and not (stats.is_closed or self._thread.is_over):
            _log.warning("the process ends with steps that the run does not have. leave() sends them", steps=lost)


class ArrayLearner:
    """Trains NumPy arrays, in place, together with the other learners of a run; needs no torch.

        with ArrayLearner(arrays, target="syncer.example:443", run="fit", learner_id="us-east") as learner:
            for batch in data:
                train(arrays, batch)
                learner.step(tokens=len(batch))

    The constructor attaches to the run and loads its newest weights into `arrays`. Only the thread that changes the
    arrays may call `step` and `flush`. While the syncer can't be reached, training goes on, and the work is sent later.

    `flush` may load newer versions too: a loop that trains on copies of the arrays copies them anew after it, as after
    a `step` that names fragments.

    Args:
        arrays: the arrays to train, by tensor name; or any `Parameters`.
        target: the syncer, as host:port; several replicas are separated by commas, and each call goes to the next
            healthy one. Or the URL of a store, such as s3://bucket/prefix or file:///folder: this process then starts
            a syncer of its own over it, which ends with it.
        run: the run's name.
        learner_id: this learner's name, unique in the run; a newer process with the same id takes its place. By default
            the host's name and a random suffix, so that a process that starts again is another learner.
        region: where the learner runs, shown to people.
        create: create the run from `arrays` if it does not exist; if several learners try, the first one creates it.
        policy: the policy of a run that is created; an existing run keeps its own.
        planned_token_count: how many tokens all learners of a run that is created are to train together; replaces the
            policy's value. Outer momentum falls to 0 towards the end of them, which improves the final weights. The run
            may take fewer or more.
        fragment_count: the number of fragments of a run that is created; by default it follows from the model's size.
        allow_other_frozen: the frozen parameters that need not be those that the run was created with, as where they
            are quantised on some machines only: their names, or patterns such as "base.*"; True for all. A warning
            says what differs.
        connect_timeout_s: how long connecting, and then attaching, may take.
        tls: the authority to trust and this learner's certificate. The files are read again when a connection can't be
            made, so they may be renewed while the learner runs. By default the public authorities are trusted, and a
            target on this machine is called in plaintext; "insecure" has other targets be called so, too.

    A process that this one forks, such as a worker of a DataLoader, is not the learner: the end of `with` and `close`
    do nothing there, and all else that a learner does is refused.

    A learner that restarts begins with the run's newest weights. What its last process had not sent is lost: at most
    the steps since its last delta.

    Raises:
        SkerryError: the syncer did not answer in time, or the run does not accept this learner; the message says why.
        ValueError: an argument can't be right: a name, an address, a number, the files of `tls`, a certificate that
            names another client, or arrays that can't be trained. Nothing was begun or written.
    """

    def __init__(self, arrays: Mapping[str, NDArray[Any]] | Parameters, **options: Unpack[LearnerOptions]) -> None:
        if not isinstance(arrays, Mapping) and not hasattr(arrays, "tensors"):
            raise TypeError(f"arrays are given by name; a torch module is for Learner. type={type(arrays).__name__}")
        self._begin(SingleProcess(ArrayParameters(arrays) if isinstance(arrays, Mapping) else arrays, options))

    def _begin(self, backend: SingleProcess) -> None:
        self._backend = backend
        self._process = OwnProcess()
        self._leaving = ExitStack()  # what is called when the learner has left
        self._leave_status: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Sends the last work within 10 s, also when the process was told to end, and leaves the run.

        Work that a failed step may have damaged is not sent.

        Raises:
            SystemExit: the loop failed after it was told to end.
        """
        if self._process.is_forked:
            return
        if self._backend.may_send_after(kind, is_told=self._leave_status is not None):
            self.leave()
            # What told this process to end may have taken the loader's workers, and so have ended the loop.
            if isinstance(error, Exception) and self._leave_status is not None:
                _log.warning("the loop failed after it was told to leave", cause=f"{type(error).__name__}: {error}")
                raise SystemExit(self._leave_status) from error
        else:
            self._backend.close(error)
            self.close()

    def leave(self, timeout_s: float = EXIT_FLUSH_TIMEOUT_S, *, load_merged: bool = False) -> LastWork:
        """Sends the last work, waits for news of what became of it, and leaves the run, as the end of `with` does.

        It takes `timeout_s` at most. Where the run has not decided by then, acknowledged work is pending: it is merged
        without this learner. Idempotent.

        With `load_merged` it also loads the run's weights, once they hold the work. Each learner gets those of the
        version that its own last work is in, so learners that leave one after another end with slightly different
        weights: the run's are those that `skerry export` and `RunsClient.pull` give. If the work is not merged within
        `timeout_s` the model keeps its own weights, so nothing that was trained is missing from it.

        Returns:
            How many of the last steps are merged, pending, dropped and unsent, and why. `if learner.leave():` asks
            whether none is missing from the run, and with `load_merged` whether the run's weights were loaded.

        Raises:
            StopExchangingError: as `step`, FORKED too.
        """
        self._process.check()
        try:
            return self._backend.leave(timeout_s, load_merged=load_merged)
        finally:
            self.close()

    def step(self, tokens: int, loss: float | None = None) -> tuple[str, ...]:
        """Reports one finished inner step; may copy a fragment or load a newer version of one. Never waits.

        Returns:
            The names of the fragments whose weights it changed, which are mostly none.

        Raises:
            ValueError: `tokens` is below 1 or no whole number. A tensor that holds one, as `mask.sum()` does, is read,
                which waits for its device.
            SystemExit: `leave_soon` was called.
            StopExchangingError: WEIGHTS_REPLACED: a state dict was loaded, or the model moved, converted or changed,
                after attaching. Nothing of it was sent; the message says what to do. FORKED: this process was forked
                from the learner's.
        """
        self._process.check()
        changed, status = self._backend.step(tokens, loss, self._leave_status)
        if status is not None:
            self._leave_status = status
            _log.info("leaving as was asked", steps=self.stats.step_count)
            raise SystemExit(status)
        return changed

    def leave_soon(self, exit_status: int = 0) -> None:
        """Has the next `step` raise SystemExit, as soon as its step is counted; for any thread and signal handlers.

        With several ranks it does so at all of them, whichever was told.

        Leaving the context then sends the last work. `leave_on_signal` calls this on SIGTERM.
        """
        self._leave_status = exit_status

    def when_left(self, call: Callable[[], None]) -> None:
        """Has `call` called when this learner has left its run, in whatever way; the last one given is called first."""
        self._leaving.callback(call)

    def flush(self, timeout_s: float, *, is_last: bool = False) -> bool:
        """Sends all unsent work and returns whether it was acknowledged within the timeout.

        Steps behind a delta in flight are sent when its round is over. Such a round opens at once, which cuts it short
        for all learners; it still needs the policy's quorum. Work that is acknowledged may wait to be merged until this
        learner, or another one, has trained on. If nothing is trained afterwards, say `is_last`: rounds then open for
        all that is in flight.

        Also true when this learner was stopped, and when the run is closed and the last fates are known, so that
        nothing can be sent.

        Raises:
            StopExchangingError: as `step`.
        """
        self._process.check()
        return self._backend.flush(timeout_s, is_last=is_last)

    def close(self) -> None:
        """Leaves the run and ends the exchange without sending anything, and says which steps the run does not have.

        What was acknowledged, as by `flush`, is merged without this learner. Idempotent.
        """
        if not self._process.is_forked:
            self._backend.close()
            self._leaving.close()

    def state_dict(self) -> dict[str, Any]:
        """Returns the learner's id and its counts of steps and tokens, for a checkpoint of yours.

        It holds no weights and no work: a learner that is killed loses the steps since its last delta.
        """
        self._process.check()
        stats = self.stats
        counts = {"step_count": stats.step_count, "token_count": stats.token_count}
        return {"learner_id": self._backend.learner_id, **counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Has counts go on after those of `state_dict`; the model keeps the run's weights.

        Call it after attaching and before the first step. A learner made with the state's `learner_id` goes on as the
        same learner.

        Raises:
            ValueError: it is not what `state_dict` returned, or a step was counted already.
        """
        self._process.check()
        try:
            counts = int(state["step_count"]), int(state["token_count"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this is not what state_dict() of a learner returned. cause={error!r}") from error
        self.count_from(*counts)

    def count_from(self, step_count: int, token_count: int) -> None:
        """Has counts of steps and tokens go on after those of an earlier process, where no `state_dict` brings them.

        They are what `skerry watch` shows. Call it after attaching and before the first step.

        Raises:
            ValueError: a step was counted already.
        """
        self._process.check()
        self._backend.count_from(step_count, token_count)

    def merged_weights(self) -> dict[str, NDArray[np.float32]]:
        """Returns copies of the run's own weights by tensor name, of the versions that `stats.versions` names.

        They are the newest that this learner adopted, at most about a round old, and hold none of its unsent steps.
        Needs no network, and memory for the whole model as float32.
        """
        self._process.check()
        return self._backend.merged_weights()

    @property
    def stats(self) -> Stats:
        """What was exchanged so far; cheap enough to read at every step."""
        return self._backend.stats

    @property
    def progress(self) -> float | None:
        """The share of the run's planned tokens that is merged or was trained here since, from 0 to 1.

        Learning rates should follow it. None until the syncer reports it, and where no length is planned.
        """
        return self.stats.progress

    @property
    def planned_token_count(self) -> int:
        """Tokens that all learners of the run are to train together; 0 if no length is planned."""
        return self.stats.planned_token_count

    @property
    def is_closed(self) -> bool:
        """Whether the run was closed: further work will not be merged."""
        return self.stats.is_closed

    @property
    def failure(self) -> SkerryError | None:
        """Why this learner stopped exchanging, if it did; training may go on."""
        return self.stats.failure


def settings_of(
    *,
    target: str,
    learner_id: str | None = None,
    policy: Policy | None = None,
    planned_token_count: int | None = None,
    tls: Tls | Insecure | None = None,
    **others: Any,
) -> ExchangeSettings:
    """Returns the settings of a learner with these `LearnerOptions`; connects to nothing and writes nothing.

    Raises:
        TypeError, ValueError: an argument can't be right; the message says which and why.
    """
    check_policy(policy)
    if planned_token_count is not None:
        policy = replace(policy or Policy(), planned_token_count=planned_token_count)
    settings = ExchangeSettings(
        learner_id=new_learner_id() if learner_id is None else learner_id, policy=policy, **others
    )
    for files in check_target(target, tls):
        check_certificate(files, settings.run, learner_id)
    return settings


def _worker_count() -> int:
    """Returns how many threads encode and decode: at most half of the processors, since training needs them."""
    return max(1, min(4, (os.cpu_count() or 1) // 2))
