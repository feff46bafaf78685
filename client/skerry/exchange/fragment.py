"""One fragment's exchange: sends deltas that are due, learns their fates, adopts new versions; one thing at a time.

Its states and the transitions between them are in `skerry.exchange.states`; this file does the I/O.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from typing import Final, NoReturn

from skerry.algorithm.rebase import FlatArray, Ledger, Trained
from skerry.algorithm.schedule import RoundRhythm, is_due
from skerry.errors import (
    CorruptDownloadError,
    PoisonedError,
    RefusedError,
    RunClosedError,
    SkerryError,
    StopExchangingError,
    TryAgainError,
    WorkRefusedError,
    error_of,
)
from skerry.exchange import states as fragment_state
from skerry.exchange.adopt import Pulled, adopt, load
from skerry.exchange.pull import pull_newest
from skerry.exchange.push import Delta, make_delta, push
from skerry.exchange.session import Session
from skerry.exchange.states import Idle, InFlight, Sending, State
from skerry.model.movement import warn_of_turn
from skerry.stats import LastWork, Stats
from skerry.v1 import exchange_pb2, types_pb2
from skerry.wire import FragmentLayout, NonFiniteError

# A link delivers bytes as they are or not at all, so these were wrong before they were sent, and are made anew.
_BYTES_AT_FAULT: Final = frozenset({"BAD_FRAME", "DIGEST_MISMATCH"})
_BASE_AT_FAULT: Final = frozenset({"BASE_FOREIGN", "BASE_FUTURE"})
# After any other error the exchange pauses, and goes on from its state.
_FINAL: Final = (PoisonedError, RunClosedError, StopExchangingError)
_NOT_FINITE: Final = "not finite"


class FragmentExchange:
    """Drives one fragment of one learner, on the event loop; any thread may read `state` and `may_send`."""

    def __init__(
        self,
        session: Session,
        layout: FragmentLayout,
        ledger: Ledger,
        *,
        contributed_step: int,
        restore_all: Callable[[], Awaitable[None]],
    ) -> None:
        """The model must already have the weights of `ledger`."""
        self.layout = layout
        self.state: State = Idle(ledger, contributed_step)
        # Held while the model's weights and the state's ledger are changed together.
        self.lock = asyncio.Lock()
        self._session = session
        self._restore_all = restore_all
        self._newest_version = ledger.version
        self._invited_version = -1
        self._rhythm = RoundRhythm()
        self._has_turned = False  # which was warned of
        self._has_progressed = False  # since the last failure: a delta was acknowledged, or a version adopted
        self.dropped_step_count = 0  # steps whose work was taken out of the model
        self._decided = LastWork()  # of the last work that was merged or lost
        self._pulls_whole = False  # the next download starts from a snapshot, not from the anchor
        self._wake = asyncio.Event()

    @property
    def ledger(self) -> Ledger:
        """The ledger of the fragment's weights."""
        return self.state.ledger

    def on_version(self, version: int) -> None:
        """Takes note that a version exists."""
        if version > self._newest_version:
            self._newest_version = version
            self._wake.set()

    def on_round_opened(self, version: int, run_step_count: float) -> None:
        """Takes note that the round that makes `version` gathers deltas, and of the run's progress."""
        if version > self._invited_version:
            self._invited_version = version
            step_count, full = self._session.trained.step_count, self._session.policy.inner_step_count
            self._rhythm.opened(step_count, run_step_count, inner_step_count=full)
            self._wake.set()

    def on_fate(self, fate: types_pb2.DeltaFate) -> None:
        """Takes note of a delta's fate, if it is the delta that is being sent or in flight."""
        session, state = self._session, self.state
        if not isinstance(state, Sending | InFlight) or fate.delta_id != state.delta.header.delta_id:
            return
        if fate.fate == types_pb2.FATE_UNSPECIFIED or (isinstance(state, InFlight) and not state.is_pending):
            return
        self.state = fragment_state.acknowledged(state, fate)
        if isinstance(state, Sending):
            self._has_progressed = True
            session.acknowledged(self.layout)
        if fate.fate == types_pb2.FATE_MERGED:
            session.unmerged.pop(self.layout.name, None)
            if state.delta.is_own:
                self._decided = LastWork(merged_step_count=state.delta.header.step_count)
                session.tally.merged(fate.staleness, asyncio.get_running_loop().time() - state.delta.taken_at_s)
            self.on_version(fate.version)
        self.wake()
        session.boundary.wake()  # so that `serve` looks whether a flush is done

    def wait_behind(self, fate: types_pb2.DeltaFate) -> None:
        """Has the fragment send nothing until a delta of an earlier session is decided."""
        if isinstance(self.state, Idle):
            self.state = fragment_state.behind(self.state, fate)
            self._wake.set()

    def wake(self) -> None:
        """Has the fragment look at the session's state again."""
        self._wake.set()

    @property
    def is_flushed(self) -> bool:
        """Whether every step is in an acknowledged delta; in a closed run, whether the last delta's fate is known."""
        state = self.state
        if isinstance(state, Sending):
            return False
        if self._session.is_closed:
            return not (isinstance(state, InFlight) and state.is_pending)
        return not self.unsent_step_count

    @property
    def last_work(self) -> LastWork:
        """What became of the last steps. Any thread may ask."""
        state, unsent = self.state, self.unsent_step_count
        if isinstance(state, InFlight) and not state.is_merged and state.delta.is_own:
            steps = state.delta.header.step_count
            if state.is_pending:
                return LastWork(pending_step_count=steps, unsent_step_count=unsent)
            if state.is_returned:
                return LastWork(unsent_step_count=unsent + steps, because=_cause(state.fate))
            return LastWork(dropped_step_count=steps, unsent_step_count=unsent, because=_cause(state.fate))
        return replace(self._decided, unsent_step_count=unsent)

    @property
    def unsent_step_count(self) -> int:
        """Steps that are in no acknowledged delta, and not lost. Any thread may ask."""
        state = self.state
        being_sent = state.delta.header.step_count if isinstance(state, Sending) else 0
        return self._session.trained.step_count - state.ledger.sent_until.step_count + being_sent

    async def run(self) -> None:
        """Runs until it is cancelled, or until this learner must stop."""
        session = self._session
        while True:
            try:
                await replace(
                    session.calls.endless,
                    is_worth_it=lambda error: isinstance(error, SkerryError) and not isinstance(error, _FINAL),
                    has_progressed=self._take_progress,
                    before_pause=self._note_failure,
                ).call(self._go_on)
            except RunClosedError:
                session.run_closed()
                if isinstance(self.state, Sending):
                    self.state = fragment_state.returned(self.state)
            except PoisonedError as error:
                session.not_merged(self.layout, _NOT_FINITE, error, is_lost=True)
                await self._restore_all()  # gradients spread it to all fragments
            except SkerryError as error:
                session.stop(error)
                return

    async def _go_on(self) -> NoReturn:
        while True:
            await self._advance()

    async def _advance(self) -> None:
        """Does the next thing, or waits until there is one."""
        has_newer = self._newest_version > self.ledger.version
        match self.state:
            case Sending():
                async with self._session.transfers:
                    await self._push()
            case InFlight(is_returned=True) | InFlight(is_quarantined=True) as state:
                await self._give_up(state)
            case InFlight(is_loaded=True) as state:
                self.state = fragment_state.adopted(state, state.ledger, is_merged=True)
            case Idle(must_adopt=True):
                await self._adopt()
            case Idle() as state if self.may_send and (state.is_turn_to_send or not has_newer):
                await self._take()
            case Idle() | InFlight() if has_newer:
                await self._adopt()
            case _:
                await self._wait()

    @property
    def may_send(self) -> bool:
        """Whether a delta is due and allowed. Any thread may ask; an outdated answer does no harm."""
        session, state = self._session, self.state
        if not isinstance(state, Idle) or session.is_closed or state.used_base == state.ledger.version:
            return False
        if session.is_flushing:
            return self.unsent_step_count > 0
        next_step = session.trained.step_count + 1  # the weights would be copied at its end
        # A round gathers deltas now, or is near and this learner slow.
        is_awaited = self._invited_version > self._newest_version or (
            self._rhythm.is_near(next_step, inner_step_count=session.policy.inner_step_count)
        )
        return (session.policy.has_waiting_rounds and is_awaited) or is_due(
            next_step,
            # Steps that were dropped are in no delta, and do not count.
            contributed_step=max(state.contributed_step, state.ledger.sent_until.step_count),
            inner_step_count=session.policy.inner_step_count,
        )

    async def _wait(self) -> None:
        """Waits for an event; with a delta in flight for a while only, since a broken stream may have lost its fate."""
        session = self._session
        session.boundary.wake()  # so that `serve` looks whether a flush is done
        patience_s = session.calls.retry.settings.longest_wait_s if session.is_closed else session.policy.lease_term_s
        timeout_s = patience_s if isinstance(self.state, InFlight) else None
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            await self._ask_fate()
        self._wake.clear()

    def _take_progress(self) -> bool:
        has_progressed, self._has_progressed = self._has_progressed, False
        return has_progressed

    def _note_failure(self, _attempt: int, error: BaseException) -> None:
        """Takes note of a failure before the pause that follows it."""
        self._pulls_whole |= isinstance(error, CorruptDownloadError)
        if not isinstance(error, WorkRefusedError):  # which was told when its work was returned
            self._session.note_failure(error)

    async def _take(self) -> None:
        """Copies the weights at the next step boundary and makes a delta of them."""
        session, layout = self._session, self.layout
        async with session.moving, self.lock:
            buffer = await session.workers.run(session.parameters.buffer, layout)
            copy = await session.workers.run(session.parameters.snapshot, layout, buffer)

            def snapshot() -> Trained:
                copy()
                return session.trained

            trained = await session.boundary.run(snapshot)
            state = self.state
            if not isinstance(state, Idle) or not self.may_send or trained == state.ledger.sent_until:
                return
            ledger, taken_at_s = state.ledger, asyncio.get_running_loop().time()

            def made() -> Delta:
                delta = make_delta(session, layout, ledger, buffer, trained=trained, taken_at_s=taken_at_s)
                self._has_turned = self._has_turned or warn_of_turn(buffer, ledger.base)
                return delta

            try:
                delta = await session.workers.run(made)
            except NonFiniteError as error:
                raise PoisonedError(
                    "NON_FINITE",
                    "weights are not finite, so the run's are loaded and the steps since the last delta are lost. An "
                    "optimizer such as Adam keeps NaN in its own state: if this repeats, reset it while the weights "
                    "are finite, in PyTorch by optimizer.state.clear(), and skip steps whose gradients are not "
                    f"finite. Else training diverges: lower the learning rate. {error}",
                ) from error
            self.state = fragment_state.taken(state, delta, buffer, trained)

    async def _push(self) -> None:
        """Sends what the syncer does not have of the delta; returns once it is acknowledged."""
        session, state = self._session, self.state
        stored: set[tuple[int, int, bytes]] = set()
        if isinstance(state, Sending) and state.was_tried:
            known = await self._ask_fate()
            stored = {(part.first, part.numel, part.digest) for part in known.parts}
            state = self.state
        if not isinstance(state, Sending):
            return  # it was acknowledged meanwhile
        self.state = fragment_state.tried(state)
        try:
            response = await push(
                session.calls,
                state.delta,
                seen_position=session.position,
                stored=stored,
                tally=session.tally,
                is_repeated=state.was_tried,
            )
        except SkerryError as error:
            self._on_push_failed(error)
            raise
        session.saw(response.position)
        if response.state != exchange_pb2.PUSH_STATE_ACCEPTED:
            raise error_of("INCOMPLETE", f"push was not accepted. delta={state.delta.header.delta_id}")
        self.on_fate(response.fate)

    async def _ask_fate(self) -> exchange_pb2.QueryPushResponse:
        """Asks what is known of the delta now, and takes note of it."""
        session, state = self._session, self.state
        assert isinstance(state, Sending | InFlight)
        request = exchange_pb2.QueryPushRequest(
            run=session.run,
            run_uid=session.run_uid,
            seen_position=session.position,
            fragment=self.layout.name,
            delta_id=state.delta.header.delta_id,
        )
        response = await session.calls.ask(lambda stubs: stubs.exchange.QueryPush, request, unknown=TryAgainError)
        session.saw(response.position)
        if response.state == exchange_pb2.PUSH_STATE_ACCEPTED:
            self.on_fate(response.fate)
        return response

    def _on_push_failed(self, error: SkerryError) -> None:
        """Returns the work if the syncer said of this very delta that it is never accepted; else the bytes are kept."""
        state = self.state
        if not isinstance(state, Sending):
            return  # an event has told meanwhile that it was acknowledged
        if not isinstance(error, WorkRefusedError | RefusedError) and error.reason not in _BYTES_AT_FAULT:
            return
        self._session.not_merged(self.layout, f"refused: {error.reason}", error, is_lost=False)
        self.state = fragment_state.refused(state, is_base_used=error.reason == "BASE_REPEATED")
        # The server does not know this base, so updates on it would be wrong.
        self._pulls_whole = error.reason in _BASE_AT_FAULT

    async def _give_up(self, state: InFlight) -> None:
        """The delta was accepted but will never be merged: its work is unsent again, or lost if it is not plausible.

        Weights with lost work are set back, since rebase would keep it. Work that was set back before is in the model
        no more, whatever became of the delta.
        """
        kind = PoisonedError if state.is_quarantined else WorkRefusedError
        reason, cause = types_pb2.Fate.Name(state.fate.fate).removeprefix("FATE_"), _cause(state.fate)
        error = kind(reason, f"delta was not merged. because={state.fate.reason}")
        self._session.not_merged(self.layout, cause, error, is_lost=state.is_quarantined)
        self.state = fragment_state.returned(state)
        if state.is_quarantined and state.ledger.in_flight is not None:
            async with self.lock:
                self.restored(await self._session.boundary.run(self.restore), cause)
                await self._session.workers.run(self._session.parameters.synchronize)  # workers read the base next

    async def _adopt(self) -> None:
        """Pulls the newest version and brings the model to it."""
        async with self._session.moving:
            weights = None if self._pulls_whole else self.ledger.anchor
            pulled = await pull_newest(self._session, self.layout, version=self.ledger.version, weights=weights)
            self._newest_version = max(self._newest_version, pulled.version)
            is_merged = await self._is_merged_into(pulled)
            before = self.state
            if isinstance(before, InFlight) and (before.is_returned or before.is_quarantined):
                return  # `_advance` changes the ledger first, and adopts then
            async with self.lock:
                if self.state is not before:
                    return  # there is news of the delta
                ledger = await adopt(self._session, self.layout, self.ledger, pulled, is_merged=is_merged)
                state = self.state
                assert not isinstance(state, Sending)
                self.state = fragment_state.adopted(state, ledger, is_merged=is_merged)
            self._pulls_whole = False
            # After a refusal only an acknowledged delta counts, so that pauses grow if every delta is refused.
            self._has_progressed |= not (isinstance(state, Idle) and state.must_adopt)
            self._session.tally.parameters_down_count += self.layout.numel
            if pulled.version < self._newest_version:
                # A version that was announced is not available yet; without a pause it would be asked for at once.
                await asyncio.sleep(self._session.calls.retry.settings.first_wait_s)

    async def _is_merged_into(self, pulled: Pulled) -> bool:
        """Whether the delta in flight is in `pulled` or an earlier version; asks the syncer if no event has told."""
        if isinstance(self.state, InFlight) and self.state.is_pending:
            await self._session.calls.retry.call(self._ask_fate)  # or the pull was for nothing
        state = self.state
        return isinstance(state, InFlight) and state.is_merged and state.fate.version <= pulled.version

    def restore(self) -> tuple[FlatArray, Trained]:
        """Loads the adopted version; for the training thread. Returns the new base, and how far training was then.

        A base that rounds may have taken in weights that were not finite, so the anchor is loaded in its place.
        """
        session, layout, parameters = self._session, self.layout, self._session.parameters
        is_exact = parameters.is_float32(layout)
        weights = self.ledger.base if is_exact else parameters.from_host(self.ledger.anchor)
        base = load(parameters, layout, weights)
        session.changed.append(layout.name)
        return base, session.trained

    def restored(self, loaded: tuple[FlatArray, Trained], because: str = _NOT_FINITE) -> None:
        """Takes note of what `restore` has returned: all local work is lost. The caller holds the lock."""
        base, trained = loaded
        step_count = trained.step_count - self.ledger.sent_until.step_count
        self.dropped_step_count += step_count
        self._decided = LastWork(dropped_step_count=step_count, because=because)
        self.state = fragment_state.restored(self.state, base, trained)


def stats_of(session: Session, fragments: Collection[FragmentExchange]) -> Stats:
    """Returns the statistics of a learner now. Any thread may ask."""
    return session.tally.stats(
        step_count=session.earlier.step_count + session.trained.step_count,
        token_count=session.earlier.token_count + session.trained.token_count,
        unsent_step_count=max((fragment.unsent_step_count for fragment in fragments), default=0),
        dropped_step_count=max((fragment.dropped_step_count for fragment in fragments), default=0),
        problem=session.standing_problem,
        is_attached=session.attached.is_set() and not session.is_over,
        loss=session.loss,
        step_time_s=session.step_time_s,
        versions={fragment.layout.name: fragment.ledger.version for fragment in fragments},
        progress=session.progress,
        planned_token_count=session.policy.planned_token_count,
        is_closed=session.is_closed,
        failure=session.failure,
    )


def _cause(fate: types_pb2.DeltaFate) -> str:
    """Returns a fate and why, without the facts, which differ between deltas."""
    word = types_pb2.Fate.Name(fate.fate).removeprefix("FATE_").lower()
    return f"{word}: {fate.reason.partition('. ')[0]}"
