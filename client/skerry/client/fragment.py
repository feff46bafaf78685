"""One fragment's exchange: send what is due, learn its fate, adopt what is new; one thing at a time.

    idle --due or invited--> snapshot, encode --> push (same bytes until acknowledged) --> in flight
      ^                                                                                     |
      +--- adopt the version that it was merged into <---- merged --------------------------+
      +--- its work is unsent again <--------------------- refused, expired, superseded ----+
      +--- the fragment is replaced <--------------------- not finite, quarantined ---------+

While a delta is in flight and acknowledged, newer versions that it is not in are adopted all the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

import structlog

from skerry.algorithm.rebase import FlatArray, Ledger, Trained
from skerry.algorithm.schedule import RoundRhythm, is_due
from skerry.client.adoption import adopt
from skerry.client.delta import push
from skerry.client.errors import (
    AttachAgainError,
    CorruptDownloadError,
    PlanExpiredError,
    PoisonedError,
    RefusedError,
    RunClosedError,
    SkerryError,
    TryAgainError,
    WorkRefusedError,
    error_of,
)
from skerry.client.joining import pull_newest
from skerry.client.outgoing import Outgoing, make_delta
from skerry.client.pull import Pulled
from skerry.client.session import Session
from skerry.v1 import exchange_pb2, types_pb2
from skerry.wire import FragmentLayout, NonFiniteError

_log = structlog.get_logger(__name__)

# Refusals of bytes that should have been right: once may be the link's fault, so often it is not.
_MAX_REFUSALS: Final = 3
_RETURNING: Final = frozenset({types_pb2.FATE_EXPIRED, types_pb2.FATE_SUPERSEDED})
_CHANGING: Final = _RETURNING | {types_pb2.FATE_QUARANTINED}
_BASE_AT_FAULT: Final = frozenset({"BASE_FOREIGN", "BASE_FUTURE"})
_BYTES_AT_FAULT: Final = frozenset({"BAD_FRAME", "DIGEST_MISMATCH"})


class FragmentExchange:
    """Drives one fragment of one learner. Belongs to the event loop."""

    def __init__(
        self,
        session: Session,
        layout: FragmentLayout,
        pulled: Pulled,
        *,
        contributed_step: int,
        restore_all: Callable[[], Awaitable[None]],
    ) -> None:
        """Starts from weights that are in the model already."""
        self.layout = layout
        # Whoever changes model and ledger together holds it.
        self.lock = asyncio.Lock()
        base = session.parameters.from_host(pulled.weights)
        self.ledger = Ledger(pulled.version, pulled.digest, pulled.weights, base)
        self._session = session
        self._restore_all = restore_all
        self._contributed_step = contributed_step
        self._earlier_contributed_step = contributed_step
        self._used_base = -1  # the base of the last delta that was accepted and not given up: no other may have it
        self._newest_version = pulled.version
        self._invited_version = -1
        self._rhythm = RoundRhythm()
        self._outgoing: Outgoing | None = None
        self._must_replace = False
        self._must_pull = False
        self._must_pull_whole = False
        # Where versions come faster than steps, each adoption meets a newer one: sending takes its turn after one.
        self._has_just_adopted = False
        self._failure_count = 0  # in a row
        self._refusal_count = 0  # of deltas, in a row
        self._wake = asyncio.Event()

    # What the exchange loop tells.

    def loaded(self, base: FlatArray) -> None:
        """Takes note of what the model holds after loading, where it rounds."""
        self.ledger = replace(self.ledger, base=base)

    def on_version(self, version: int) -> None:
        """Takes note that a version exists."""
        if version > self._newest_version:
            self._newest_version = version
            self._wake.set()

    def on_round_opened(self, version: int) -> None:
        """Takes note that the round that makes `version` gathers deltas."""
        if version > self._invited_version:
            self._invited_version = version
            self._rhythm.opened(self._session.trained.step_count)
            self._wake.set()

    def on_fate(self, fate: types_pb2.DeltaFate) -> None:
        """Takes note of the fate of a delta, if it is the one in flight."""
        outgoing, delta = self._outgoing, self.ledger.delta
        if outgoing is None or delta is None or fate.delta_id != delta.delta_id:
            return
        if fate.fate == types_pb2.FATE_UNSPECIFIED or outgoing.final_fate is not None:
            return
        if outgoing.fate is None:
            self._acknowledged(outgoing, delta.end)
        outgoing.fate = fate
        if fate.fate == types_pb2.FATE_MERGED:
            waited_s = asyncio.get_running_loop().time() - outgoing.taken_at_s
            self._session.tally.merged(fate.staleness, waited_s)
            self.on_version(fate.version)
        self._wake.set()

    def wake(self) -> None:
        """Lets the fragment look at the session's state again."""
        self._wake.set()

    @property
    def is_flushed(self) -> bool:
        """Whether every step is in an acknowledged delta."""
        is_acknowledged = self._outgoing is None or self._outgoing.fate is not None
        return is_acknowledged and self._session.trained.step_count <= self.ledger.sent_until.step_count

    # The one task.

    async def run(self) -> None:
        """Goes on until it is cancelled."""
        while True:
            try:
                await self._advance()
            except RunClosedError:
                self._session.run_closed()
                self._withdraw()
            except (AttachAgainError, TryAgainError, PlanExpiredError, CorruptDownloadError) as error:
                await self._pause(error)
            except PoisonedError as error:
                self._drop(error)
                if error.reason == "NON_FINITE":
                    await self._restore_all()  # one bad fragment makes the next step's gradients bad everywhere
            except RefusedError as error:
                await self._pause(error, is_defect=True)
            except SkerryError as error:
                self._session.stop(error)
                return

    async def _advance(self) -> None:
        """Does the next thing, or waits until there is one."""
        outgoing = self._outgoing
        if outgoing is not None and outgoing.fate is None:
            await self._push(outgoing)
        elif outgoing is not None and outgoing.fate is not None and outgoing.final_fate in _RETURNING:
            self._returned(outgoing.fate.reason)
        elif outgoing is not None and outgoing.fate is not None and outgoing.final_fate == types_pb2.FATE_QUARANTINED:
            self._drop(PoisonedError("QUARANTINED", f"delta was quarantined. because={outgoing.fate.reason}"))
        elif (
            self._must_replace
            or self._must_pull
            or (self._newest_version > self.ledger.version and not (self._has_just_adopted and self.may_send))
        ):
            await self._adopt()
        elif self.may_send:
            await self._take()
        else:
            await self._wait()

    @property
    def may_send(self) -> bool:
        """Whether a delta is due, and allowed. Any thread may ask; an answer just out of date does no harm."""
        session = self._session
        if self._outgoing is not None or session.is_closed or self._used_base == self.ledger.version:
            return False
        if session.trained.step_count <= self.ledger.sent_until.step_count and session.is_flushing:
            return False
        next_step = session.trained.step_count + 1  # at its end the weights would be copied
        return (
            session.is_flushing
            or (session.policy.has_waiting_rounds and self._is_awaited(next_step))
            or is_due(
                next_step,
                # Steps that a replacement dropped are in no delta, and so count for none.
                contributed_step=max(self._contributed_step, self.ledger.sent_until.step_count),
                inner_step_count=session.policy.inner_step_count,
            )
        )

    def _is_awaited(self, next_step: int) -> bool:
        """Whether a round gathers deltas now, or is about to where this learner is slow."""
        return self._invited_version > self._newest_version or self._rhythm.is_near(
            next_step, inner_step_count=self._session.policy.inner_step_count
        )

    async def _wait(self) -> None:
        """Waits for news; with a delta in flight not for ever, for its news may have been lost with a stream."""
        if self._session.is_flushing:
            self._session.boundary.wake()  # whoever waits for the flush looks again
        timeout_s = None if self._outgoing is None else self._session.policy.lease_term_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            await self._ask_fate(self._session.position)
        self._wake.clear()

    async def _pause(self, error: SkerryError, *, is_defect: bool = False) -> None:
        """Waits after a failure; the same thing is tried again after it."""
        self._failure_count += 1
        if isinstance(error, CorruptDownloadError):
            self._must_pull = self._must_pull_whole = True
        log = _log.error if is_defect else _log.warning
        if self._failure_count == 1 or is_defect:
            log(
                "exchange of a fragment failed, will try again",
                learner=self._session.settings.learner_id,
                fragment=self.layout.name,
                reason=error.reason,
                because=str(error),
            )
        await asyncio.sleep(self._session.settings.retry.wait_s(self._failure_count, error, self._session.calls.jitter))

    # Up.

    async def _take(self) -> None:
        """Copies the weights at the next step boundary and makes a delta of them."""
        session, layout = self._session, self.layout
        self._has_just_adopted = False
        async with self.lock:
            buffer = await session.workers.run(session.parameters.buffer, layout)
            copy = await session.workers.run(session.parameters.snapshot, layout, buffer)

            def snapshot() -> Trained:
                copy()
                return session.trained

            trained = await session.boundary.run(snapshot)
            if trained.step_count <= self.ledger.sent_until.step_count or not self.may_send:
                return
            taken_at_s = asyncio.get_running_loop().time()
            delta_id = session.entropy.hex_id()
            try:
                encoded, decoded = await session.workers.run(
                    lambda: make_delta(session, layout, self.ledger, buffer, delta_id, trained=trained)
                )
            except NonFiniteError as error:
                poison = PoisonedError("NON_FINITE", f"weights are not finite. {error}")
            else:
                self.ledger = self.ledger.sent(delta_id, decoded, trained)
                self._outgoing = Outgoing(encoded, taken_at_s)
                return
        raise poison

    async def _push(self, outgoing: Outgoing) -> None:
        """Sends the delta until it is acknowledged or refused."""
        try:
            async with self._session.transfers:
                await self._session.calls.repeat(lambda: self._push_once(outgoing))
        except WorkRefusedError as error:
            self._refused(error)
            await asyncio.sleep(
                self._session.settings.retry.wait_s(self._refusal_count, error, self._session.calls.jitter)
            )
        except (TryAgainError, RefusedError) as error:
            outgoing.refusal_count += error.reason in _BYTES_AT_FAULT or isinstance(error, RefusedError)
            if isinstance(error, RefusedError) or outgoing.refusal_count >= _MAX_REFUSALS:
                self._refused(error)
            raise
        else:
            self._failure_count = self._refusal_count = 0

    async def _push_once(self, outgoing: Outgoing) -> None:
        session, encoded = self._session, outgoing.encoded
        if encoded is None or outgoing.fate is not None:
            return  # an event acknowledged it meanwhile
        stored: set[tuple[int, int, bytes]] = set()
        if outgoing.was_tried:
            known = await self._ask_fate(session.position)
            if known.state == exchange_pb2.PUSH_STATE_ACCEPTED:
                return
            stored = {(part.first, part.numel, part.digest) for part in known.parts}
        outgoing.was_tried = True
        response = await push(
            session.calls.transport,
            encoded,
            seen_position=session.position,
            stored=stored,
            stall_timeout_s=session.settings.stall_timeout_s,
            count_bytes=session.tally.sent,
        )
        session.saw(response.position)
        if response.state != exchange_pb2.PUSH_STATE_ACCEPTED:
            raise error_of("INCOMPLETE", f"push was not accepted. delta={encoded.header.delta_id}")
        self.on_fate(response.fate)

    async def _ask_fate(self, position: int) -> exchange_pb2.QueryPushResponse:
        """Asks what is known of the delta in flight at `position` or later, and takes note of it."""
        session, delta = self._session, self.ledger.delta
        assert delta is not None
        request = exchange_pb2.QueryPushRequest(
            run=session.settings.run,
            run_uid=session.run_uid,
            seen_position=position,
            fragment=self.layout.name,
            delta_id=delta.delta_id,
        )
        timeout_s = session.settings.call_timeout_s
        response = await session.calls.transport.query_push(request, timeout_s=timeout_s)
        session.saw(response.position)
        if response.state == exchange_pb2.PUSH_STATE_ACCEPTED:
            self.on_fate(response.fate)
        return response

    def _acknowledged(self, outgoing: Outgoing, end: Trained) -> None:
        outgoing.encoded = None
        self._used_base = max(self._used_base, self.ledger.delta.base_version if self.ledger.delta else -1)
        self._earlier_contributed_step = self._contributed_step
        self._contributed_step = end.step_count
        self._session.tally.deltas_acknowledged += 1
        self._session.tally.parameters_up_count += self.layout.numel
        if self._session.is_flushing:
            self._session.boundary.wake()

    def _refused(self, error: SkerryError) -> None:
        """The delta was never accepted: its work is unsent again, and goes out from a base that the server knows."""
        _log.warning(
            "delta was refused, its work will be sent again",
            learner=self._session.settings.learner_id,
            fragment=self.layout.name,
            reason=error.reason,
            because=str(error),
        )
        self.ledger = self.ledger.returned()
        self._outgoing = None
        self._session.tally.deltas_returned += 1
        self._refusal_count += 1
        self._must_pull = True
        # What the server does not know of the base was not pulled from it.
        self._must_pull_whole = error.reason in _BASE_AT_FAULT
        if error.reason == "BASE_REPEATED":
            self._used_base = max(self._used_base, self.ledger.version)

    def _returned(self, reason: str) -> None:
        """The delta was accepted but will never be merged: its work is unsent again."""
        _log.info(
            "delta expired, its work will be sent again",
            learner=self._session.settings.learner_id,
            fragment=self.layout.name,
            because=reason,
        )
        self.ledger = self.ledger.returned()
        self._outgoing = None
        self._contributed_step = self._earlier_contributed_step
        self._used_base = -1
        self._session.tally.deltas_returned += 1

    def _withdraw(self) -> None:
        """The run is closed: what is not acknowledged never will be."""
        if self._outgoing is not None and self._outgoing.fate is None:
            self.ledger = self.ledger.returned()
            self._outgoing = None

    def _drop(self, error: PoisonedError) -> None:
        """The delta is poison, or the weights are: the fragment will be replaced, for rebase would keep it."""
        _log.error(
            "work of a fragment is dropped, it will be replaced",
            learner=self._session.settings.learner_id,
            fragment=self.layout.name,
            reason=error.reason,
            because=str(error),
        )
        self._session.tally.deltas_dropped += self._outgoing is not None
        if self.ledger.delta is not None:
            self.ledger = replace(self.ledger, delta=None)
        if self._outgoing is not None and self._outgoing.fate is not None:
            self._used_base = -1
        self._outgoing = None
        self._must_replace = True

    # Down.

    async def _adopt(self) -> None:
        """Pulls the newest version and brings the model to it."""
        ledger = self.ledger
        weights = None if self._must_pull_whole else ledger.anchor
        pulled = await pull_newest(self._session, self.layout, version=ledger.version, weights=weights)
        self._newest_version = max(self._newest_version, pulled.version)
        is_merged = await self._is_merged_into(pulled)
        if self._outgoing is not None and self._outgoing.final_fate in _CHANGING:
            return  # the account changes first; what was pulled is pulled again
        async with self.lock:
            self.ledger = await adopt(
                self._session,
                self.layout,
                self.ledger,
                pulled,
                is_merged=is_merged,
                must_replace=self._must_replace,
            )
        if is_merged:
            self._outgoing = None
        self._must_replace = self._must_pull = self._must_pull_whole = False
        self._has_just_adopted = True
        self._failure_count = 0
        self._session.tally.parameters_down_count += self.layout.numel
        if pulled.version < self._newest_version:
            # A version that was announced is not there yet: not to be asked for without a pause.
            await asyncio.sleep(self._session.settings.retry.first_wait_s)

    async def _is_merged_into(self, pulled: Pulled) -> bool:
        """Whether the delta in flight is in `pulled` or a version before it: asked for, where no event has said."""
        outgoing = self._outgoing
        if outgoing is None:
            return False
        if outgoing.final_fate is None:
            await self._session.calls.repeat(lambda: self._ask_fate(pulled.position))
        fate = outgoing.fate
        return fate is not None and fate.fate == types_pb2.FATE_MERGED and fate.version <= pulled.version

    # Poison elsewhere.

    def restore_if_poisoned(self) -> bool:
        """Puts the base back if the weights are not finite; for the training thread. Returns whether it did."""
        if self._session.parameters.is_finite(self.layout):
            return False
        self._session.parameters.load(self.layout, self.ledger.base)()
        return True

    def restored(self, trained: Trained) -> None:
        """Books that `restore_if_poisoned` put the base back; the caller holds the lock."""
        ledger = self.ledger
        self.ledger = ledger.replaced(
            ledger.version, ledger.digest, ledger.anchor, ledger.base, trained, is_over=ledger.delta is None
        )
