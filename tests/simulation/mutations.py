"""Defects put into the product on purpose, so that the auditor shows that it would find them.

Each replaces one decision by the mistake that a person might make. A mutation that no history betrays means that the
auditor, or the faults, have a blind spot.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pytest

from skerry.algorithm.rebase import Ledger
from skerry.client.fragment import FragmentExchange
from skerry.client.fragment_state import Idle, InFlight, Sending
from skerry.store.errors import StoreError
from skerry.store.log import checks, fold
from skerry.store.log.entries import RunStatus
from skerry.store.log.fold import RunState
from skerry.store.log.run_log import RunLog
from skerry.store.log.state import DeltaState, Rejection
from skerry.store.objects.put_if_absent import Creator
from skerry.store.versions.blobs import StoredPart
from skerry.syncer.push import Push
from skerry.syncer.rounds import RoundEngine
from skerry.v1 import exchange_pb2, types_pb2
from tests.simulation.auditor import Finding
from tests.simulation.judgement import judge


@dataclass(frozen=True)
class Mutation:
    """One defect, and the weather in which it shows."""

    name: str
    apply: Callable[[pytest.MonkeyPatch], None]
    mix: str
    seed: int  # the first to try: it betrayed it when this was written
    rule: str  # that it breaks


def _resends_with_a_new_id(patch: pytest.MonkeyPatch) -> None:
    """A push that was tried before goes out under another id."""
    push_once = FragmentExchange._push_once

    async def renamed(self: FragmentExchange) -> None:
        if isinstance(self.state, Sending) and self.state.was_tried:
            self.state.delta.header.delta_id = self._session.entropy.hex_id()
        await push_once(self)

    patch.setattr(FragmentExchange, "_push_once", renamed)


def _accepts_a_repeated_base(patch: pytest.MonkeyPatch) -> None:
    """The fold admits a second delta from one base, which such a client sends."""

    def none(*_: object) -> None:
        return None

    patch.setattr(checks, "check_repeated_base", none)
    _resends_with_a_new_id(patch)


def _checks_no_session(patch: pytest.MonkeyPatch) -> None:
    """The fold takes deltas of every session, fenced or not, and the client does not stop when it is fenced."""

    def status_only(state: RunState, learner_id: str, session: str) -> Rejection | None:
        if state.status is not RunStatus.OPEN:
            return Rejection("RUN_CLOSED", "run takes no deltas any more")
        return None

    patch.setattr(checks, "check_push_session", status_only)
    patch.setattr(
        checks,
        "check_session",
        lambda state, item: (
            None if state.status is RunStatus.OPEN else Rejection("RUN_CLOSED", "run takes no learners")
        ),
    )


def _acknowledges_before_the_append(patch: pytest.MonkeyPatch) -> None:
    """The answer goes out while the entry is on its way."""
    append = RunLog.append
    accept = Push._accept

    async def accept_early(self: Push, parts: Sequence[StoredPart], digest: bytes) -> None:
        log = self._replica.log

        async def begin(items: Sequence[Any]) -> Any:
            task = asyncio.create_task(append(log, items))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._early = DeltaState(items[0], 0)  # type: ignore[attr-defined]
            raise _Early

        log.append = begin  # type: ignore[method-assign]
        try:
            await accept(self, parts, digest)
        except _Early:
            pass
        finally:
            del log.append

    def known(self: Push) -> DeltaState | None:
        found = self._replica.state.deltas.get(self._header.delta)
        return found or getattr(self, "_early", None)

    patch.setattr(Push, "_accept", accept_early)
    patch.setattr(Push, "known", property(known))


class _Early(Exception):  # noqa: N818 - a way out, not an error
    """Leaves the acceptance before its append is over."""


def _takes_an_error_for_failure(patch: pytest.MonkeyPatch) -> None:
    """A create that says it failed is taken at its word and never read back: the number is tried with other bytes."""

    async def settle(self: Creator, name: str, data: bytes) -> bytes:
        try:
            await self.objects.create(name, data)
        except StoreError:
            try:
                return await self.objects.get(name)
            except StoreError:
                return data
        return data

    patch.setattr(Creator, "settle", settle)


def _says_accepted_for_stored_parts(patch: pytest.MonkeyPatch) -> None:
    """The client takes durable parts for an accepted delta."""
    ask = FragmentExchange._ask_fate

    async def believing(self: FragmentExchange, position: int) -> exchange_pb2.QueryPushResponse:
        response = await ask(self, position)
        if response.parts and isinstance(self.state, Sending | InFlight):
            response.state = exchange_pb2.PUSH_STATE_ACCEPTED
            response.fate.delta_id = self.state.delta.delta_id
            response.fate.fragment = self.layout.name
            response.fate.fate = types_pb2.FATE_PENDING
            self._session.calls.transport._note_state(response)  # type: ignore[attr-defined]
            self.on_fate(response.fate)
        return response

    patch.setattr(FragmentExchange, "_ask_fate", believing)


def _keeps_merged_work(patch: pytest.MonkeyPatch) -> None:
    """Adoption leaves a merged delta's work in the model, where the new version brings it once more."""
    shift = Ledger.shift

    def unmerged(self: Ledger, *given: Any, is_merged: bool) -> Any:
        return shift(self, *given, is_merged=False)

    patch.setattr(Ledger, "shift", unmerged)


def _forgets_returned_work(patch: pytest.MonkeyPatch) -> None:
    """Work of a delta that was refused or expired counts as sent."""

    def returned(self: Ledger) -> Ledger:
        return dataclasses.replace(self, in_flight=None)

    patch.setattr(Ledger, "returned", returned)


def _never_takes_its_turn(patch: pytest.MonkeyPatch) -> None:
    """A learner always adopts what is newest before it sends."""
    patch.setattr(Idle, "is_turn_to_send", property(lambda _: False, lambda *_: None))


def _leaves_others_merges(patch: pytest.MonkeyPatch) -> None:
    """No replica takes over the merge of one that died."""
    merge_due = RoundEngine._merge_due

    def own_only(self: RoundEngine, *given: Any) -> Any:
        key, due_s = merge_due(self, *given)
        return key, due_s if key in self._proposed else due_s + 1e6

    patch.setattr(RoundEngine, "_merge_due", own_only)


def _keeps_frozen_deltas_pending(patch: pytest.MonkeyPatch) -> None:
    """A close leaves its members in the gathering round, so that the next takes them again."""
    admit_closed = RunState._admit_closed

    def admit(self: RunState, item: Any) -> Any:
        pending = dict(self.fragments[item.fragment].pending)
        decided = admit_closed(self, item)
        members = {member.delta for member in item.members}
        self.fragments[item.fragment].pending.update(
            {name: delta for name, delta in pending.items() if name in members}
        )
        return decided

    patch.setattr(RunState, "_admit_closed", admit)


def _folds_by_arrival(patch: pytest.MonkeyPatch) -> None:
    """A replica counts a learner's steps by what it saw itself: replicas no longer fold to one state."""
    admit_accepted = RunState._admit_accepted
    seen = {"count": 0}

    def admit(self: RunState, item: Any) -> Any:
        seen["count"] += 1
        decided = admit_accepted(self, item)
        self.deltas[item.delta].staleness = seen["count"] % 2
        return decided

    patch.setattr(fold.RunState, "_admit_accepted", admit)


MUTATIONS: Final = (
    Mutation("resends with a new id", _resends_with_a_new_id, "network", 0, "every inner step is merged at most once"),
    Mutation(
        "accepts a repeated base", _accepts_a_repeated_base, "network", 0, "every inner step is merged at most once"
    ),
    Mutation("checks no session", _checks_no_session, "sleepers", 1, "no delta of a fenced session is accepted"),
    Mutation(
        "acknowledges early", _acknowledges_before_the_append, "alone", 0, "every acknowledged delta was in the log"
    ),
    Mutation("reads no create back", _takes_an_error_for_failure, "store", 0, "nothing fails by a defect"),
    Mutation("keeps merged work", _keeps_merged_work, "alone", 0, "every delta holds the steps that it claims"),
    Mutation("folds by arrival", _folds_by_arrival, "alone", 0, "all replicas fold to the same state"),
    Mutation("takes parts for a delta", _says_accepted_for_stored_parts, "network", 2, "every acknowledged delta"),
    Mutation(
        "forgets returned work", _forgets_returned_work, "network", 1, "no work of a learner that flushed and left"
    ),
    Mutation("never takes its turn", _never_takes_its_turn, "calm", 1, "all work is merged"),
    Mutation("leaves others' merges", _leaves_others_merges, "replicas", 0, "every fragment moves once nothing fails"),
    Mutation("keeps frozen deltas", _keeps_frozen_deltas_pending, "calm", 0, "every accepted delta has one fate"),
)
# Those whose histories are short enough for every test run; a campaign's `--mutations` goes through all.
QUICK_COUNT: Final = 7


def betrayals(mutation: Mutation, *, seed_count: int = 8) -> Iterator[Finding]:
    """Yields what the auditor finds in histories of the mutated product, up to the first that betrays it."""
    for seed in range(mutation.seed, mutation.seed + seed_count):
        with pytest.MonkeyPatch.context() as patch:
            mutation.apply(patch)
            findings = judge(mutation.mix, seed).findings
        if any(finding.rule.startswith(mutation.rule) for finding in findings):
            yield from findings
            return
