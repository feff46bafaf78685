"""Defects put into the product on purpose, so that the auditor shows that it would find them.

Each replaces one decision by the mistake that a person might make. If no history shows a
mutation, the auditor or the faults have a blind spot.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias
from weakref import WeakKeyDictionary

import pytest

from skerry.algorithm.rebase import Ledger
from skerry.errors import RefusedError, SkerryError, TryAgainError
from skerry.exchange.fragment import FragmentExchange
from skerry.exchange.states import Idle, Sending
from skerry.net.grpc_transport import error_from_rpc
from skerry.net.liveness import Vigil
from skerry.v1 import exchange_pb2, types_pb2
from skerry_syncer.errors import SyncerError
from skerry_syncer.rounds.engine import Decisions, RoundEngine
from skerry_syncer.run import replica
from skerry_syncer.run.push import Push
from skerry_syncer.run.replica import RunReplica
from skerry_syncer.store import store
from skerry_syncer.store.errors import StoreError
from skerry_syncer.store.log import fold, run_log
from skerry_syncer.store.log.entries import AcceptedItem, ClosedItem, CommittedItem, Fate, Item, SessionItem
from skerry_syncer.store.log.run_log import RunLog
from skerry_syncer.store.log.state import DeltaState, FragmentState, Outcome, RunState, VersionState
from skerry_syncer.store.objects.interface import Objects
from skerry_syncer.store.versions.blobs import Blobs
from tests.simulation import network
from tests.simulation.auditor import Finding
from tests.simulation.campaign import judge
from tests.simulation.sim_transport import SimTransport

_Apply: TypeAlias = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Mutation:
    """One defect, and a mix and seed in which the auditor finds it."""

    name: str
    apply: _Apply
    mix: str
    seed: int  # the first to try
    rule: str  # that it breaks: a finding's rule begins with this


MUTATIONS: Final[list[Mutation]] = []


def _defect(mix: str, seed: int, rule: str) -> Callable[[_Apply], _Apply]:
    """Makes a mutation of a function that puts a defect into the product."""

    def keep(apply: _Apply) -> _Apply:
        MUTATIONS.append(Mutation(apply.__name__.strip("_"), apply, mix, seed, rule))
        return apply

    return keep


@_defect("ejections", 0, "an ejected learner takes no part")
def _ejections_expire_deltas_and_refuse_nothing(patch: pytest.MonkeyPatch) -> None:
    """The fold forgets to look whether a learner is ejected."""
    patch.setattr(fold, "check_ejected", lambda *_: None)
    patch.setattr(replica, "check_ejected", lambda *_: None)


@_defect("network", 0, "every inner step is merged at most once")
def _resends_with_a_new_id(patch: pytest.MonkeyPatch) -> None:
    """A push that was tried before goes out under another id."""
    push_once = FragmentExchange._push

    async def renamed(self: FragmentExchange) -> None:
        if isinstance(self.state, Sending) and self.state.was_tried:
            self.state.delta.header.delta_id = self._session.entropy.hex_id()
        await push_once(self)

    patch.setattr(FragmentExchange, "_push", renamed)


@_defect("proxies", 0, "every inner step is merged at most once")
def _takes_any_refusal_for_the_syncers(patch: pytest.MonkeyPatch) -> None:
    """Whoever refuses a push, the client takes the delta for one that is never accepted, and sends its work again."""

    def from_anybody(error: Any, *, unknown: type[SkerryError]) -> SkerryError:
        return error_from_rpc(error, unknown=RefusedError if unknown is TryAgainError else unknown)

    patch.setattr(network, "error_from_rpc", from_anybody)


@_defect("network", 0, "every inner step is merged at most once")
def _accepts_a_repeated_base(patch: pytest.MonkeyPatch) -> None:
    """The fold admits a second delta from one base, which such a client sends."""

    def none(*_: object) -> None:
        return None

    patch.setattr(fold, "check_repeated_base", none)
    _resends_with_a_new_id(patch)


@_defect("sleepers", 1, "no delta of a fenced session is accepted")
def _checks_no_session(patch: pytest.MonkeyPatch) -> None:
    """The fold takes deltas of every session, fenced or not, and the client does not stop when it is fenced."""
    _, apply = fold.RULES[SessionItem]
    patch.setattr(fold, "check_live", lambda *_: None)
    patch.setitem(fold.RULES, SessionItem, (lambda state, _: fold.check_open(state), apply))


@_defect("alone", 0, "every acknowledged delta was in the log")
def _acknowledges_before_the_append(patch: pytest.MonkeyPatch) -> None:
    """The answer goes out while the entry is on its way."""
    append, begin = RunLog.append, Push.__init__
    known: Any = vars(Push)["known"]
    headers: WeakKeyDictionary[Push, AcceptedItem] = WeakKeyDictionary()
    early: dict[str, DeltaState] = {}

    def begin_noted(self: Push, replica: Any, header: AcceptedItem, budget: Any, client: str) -> None:
        begin(self, replica, header, budget, client)
        headers[self] = header

    async def append_later(self: RunLog, items: Sequence[Item]) -> tuple[Outcome, ...]:
        if not isinstance(items[0], AcceptedItem):
            return await append(self, items)
        task = asyncio.create_task(append(self, items))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        early[items[0].delta] = DeltaState(items[0], 0)
        return (Outcome(items[0], None),)

    def known_early(self: Push) -> DeltaState | None:
        return known.fget(self) or early.get(headers[self].delta)

    patch.setattr(Push, "__init__", begin_noted)
    patch.setattr(RunLog, "append", append_later)
    patch.setattr(Push, "known", property(known_early))


@_defect("store", 0, "nothing fails by a defect")
def _takes_an_error_for_failure(patch: pytest.MonkeyPatch) -> None:
    """A create that says it failed is taken at its word and never read back: the number is tried with other bytes."""

    async def create_or_read(objects: Objects, name: str, data: bytes, **_: Any) -> bytes:
        try:
            await objects.create(name, data)
        except StoreError:
            try:
                return await objects.get(name)
            except StoreError:
                return data
        return data

    for module in (store, run_log):
        patch.setattr(module, "create_or_read", create_or_read)


@_defect("proxies", 2, "every acknowledged delta")
def _says_accepted_for_stored_parts(patch: pytest.MonkeyPatch) -> None:
    """The client takes durable parts for an accepted delta, and so hears that of a push that is not complete."""
    ask = SimTransport.ask

    async def believing(self: SimTransport, method: Any, request: Any, **rules: Any) -> Any:
        response = await ask(self, method, request, **rules)
        if isinstance(response, exchange_pb2.QueryPushResponse) and response.parts:
            response.state = exchange_pb2.PUSH_STATE_ACCEPTED
            response.fate.delta_id = request.delta_id
            response.fate.fragment = request.fragment
            response.fate.fate = types_pb2.FATE_PENDING
            self.note_state(response)
        return response

    patch.setattr(SimTransport, "ask", believing)


@_defect("alone", 0, "every delta holds the steps that it claims")
def _keeps_merged_work(patch: pytest.MonkeyPatch) -> None:
    """Adoption leaves a merged delta's work in the model, where the new version brings it once more."""
    shift = Ledger.shift

    def unmerged(self: Ledger, *given: Any, is_merged: bool, **more: Any) -> Any:
        return shift(self, *given, is_merged=False, **more)

    patch.setattr(Ledger, "shift", unmerged)


@_defect("roll-backs", 1, "no work of a learner that flushed and left")
def _forgets_returned_work(patch: pytest.MonkeyPatch) -> None:
    """Work of a delta that was refused or expired counts as sent."""

    def returned(self: Ledger) -> Ledger:
        return dataclasses.replace(self, in_flight=None)

    patch.setattr(Ledger, "returned", returned)


@_defect("calm", 1, "all work is merged")
def _never_takes_its_turn(patch: pytest.MonkeyPatch) -> None:
    """A learner always adopts what is newest before it sends."""
    patch.setattr(Idle, "is_turn_to_send", property(lambda _: False, lambda *_: None))


@_defect("replicas", 0, "every fragment moves once nothing fails")
def _leaves_others_merges(patch: pytest.MonkeyPatch) -> None:
    """No replica takes over the merge of one that died."""
    appended, decide = RoundEngine.appended, RoundEngine.decide
    own: WeakKeyDictionary[RoundEngine, set[ClosedItem]] = WeakKeyDictionary()

    def appended_noted(self: RoundEngine, outcomes: Sequence[Outcome]) -> None:
        closes = [outcome.item for outcome in outcomes if outcome.rejection is None]
        own.setdefault(self, set()).update(item for item in closes if isinstance(item, ClosedItem))
        appended(self, outcomes)

    def decide_own(self: RoundEngine, *given: Any, **options: Any) -> Decisions:
        decisions = decide(self, *given, **options)
        merges = tuple(closing for closing in decisions.merges if closing in own.get(self, set()))
        return dataclasses.replace(decisions, merges=merges)

    patch.setattr(RoundEngine, "appended", appended_noted)
    patch.setattr(RoundEngine, "decide", decide_own)


@_defect("roll-backs", 0, "a change of the policy")
def _changes_an_old_policy(patch: pytest.MonkeyPatch) -> None:
    """A change of the policy is made from what the replica has folded, whatever comes before its entry."""

    async def append_at_once(self: RunLog, make: Callable[[RunState], Item]) -> Outcome:
        (outcome,) = await self.append([make(self.state)])
        return outcome

    patch.setattr(RunLog, "append_made", append_at_once)


@_defect("learners", 0, "nothing fails by a defect")
def _fences_new_sessions(patch: pytest.MonkeyPatch) -> None:
    """A session that never was can't take over a learner that has one."""
    attach = RunReplica.attach

    async def attach_first(self: RunReplica, item: SessionItem) -> None:
        known = self.state.learners.get(item.learner)
        if known is not None and known.session != item.session:
            raise SyncerError("SESSION_FENCED", f"a newer session attached. learner={item.learner}")
        await attach(self, item)

    patch.setattr(RunReplica, "attach", attach_first)


@_defect("calm", 0, "every accepted delta has one fate")
def _forgets_a_fate(patch: pytest.MonkeyPatch) -> None:
    """A commit of several deltas says nothing of the last of them."""

    def forget(state: RunState, item: Item) -> None:
        if isinstance(item, CommittedItem):
            commit = state.fragments[item.fragment].newest.commit
            if commit is not None and len(commit.close.members) > 1:
                state.deltas[commit.close.members[-1].delta].fate = Fate.PENDING

    _after_each_admitted(patch, forget)


@_defect("alone", 0, "all replicas fold to the same state")
def _folds_by_arrival(patch: pytest.MonkeyPatch) -> None:
    """A replica counts a learner's steps by what it saw itself: replicas no longer fold to one state."""
    count = itertools.count(1)

    def misjudge(state: RunState, item: Item) -> None:
        if isinstance(item, AcceptedItem):
            state.deltas[item.delta].staleness = next(count) % 2

    _after_each_admitted(patch, misjudge)


def _after_each_admitted(patch: pytest.MonkeyPatch, change: Callable[[RunState, Item], None]) -> None:
    """Changes the fold's state after every item that it admits."""
    apply = fold._apply_item

    def applied(state: RunState, item: Item) -> Outcome:
        outcome = apply(state, item)
        if outcome.rejection is None:
            change(state, item)
        return outcome

    patch.setattr(fold, "_apply_item", applied)


@_defect("damage", 8, "verify finds nothing")
def _trusts_what_it_reads(patch: pytest.MonkeyPatch) -> None:
    """Snapshots and updates are used as they are read, whatever their digests are."""
    patch.setattr(Blobs, "read_checked", Blobs.read)


@_defect("retention", 0, "no collection takes what a replica that catches up needs")
def _collects_what_leads_to_the_newest(patch: pytest.MonkeyPatch) -> None:
    """A collection takes the newest version for all that there is to know, and not what rebuilding it begins from."""

    def newest(self: RunState, fragment: FragmentState, newest: int) -> Iterator[VersionState]:
        yield fragment.versions[newest]

    patch.setattr(RunState, "chain", newest)


@_defect("retention", 0, "what was the newest within the policy")
def _goes_by_calendar_clocks(patch: pytest.MonkeyPatch) -> None:
    """A run's age is what each writer's calendar says, which is hours off on some of them."""
    patch.setattr(RunLog, "age_s", lambda log: log.clock.unix_s())


@_defect("sleepers", 1, "no process supersedes")
def _does_not_wait_behind(patch: pytest.MonkeyPatch) -> None:
    """A process that starts looks at no delta of the one before it."""
    patch.setattr(FragmentExchange, "wait_behind", lambda *_: None)


@_defect("replicas", 0, "nothing fails by a defect")
def _waits_for_who_hangs(patch: pytest.MonkeyPatch) -> None:
    """A client watches no replica's life, and waits until the connection breaks."""
    patch.setattr(Vigil, "begin", lambda _: None)


def findings_of(mutation: Mutation, *, seed_count: int = 8) -> Iterator[Finding]:
    """Yields the findings in the first history of the mutated product that breaks the mutation's rule, if one does."""
    for seed in range(mutation.seed, mutation.seed + seed_count):
        with pytest.MonkeyPatch.context() as patch:
            mutation.apply(patch)
            findings = judge(mutation.mix, seed).findings
        if any(finding.rule.startswith(mutation.rule) for finding in findings):
            yield from findings
            return
