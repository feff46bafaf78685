"""Checks a finished run against the rules that hold for every run, whatever went wrong in it.

It sees the store's objects and what each learner noted of itself (`Evidence`), and folds the log on its own. Where it
can it believes nobody: which steps a delta holds is read from the delta's contents, not from its header.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from skerry.runtime.workers import InlineWorkers
from skerry.v1 import exchange_pb2, types_pb2
from skerry.wire.codecs import Codec
from skerry.wire.messages import policy_from_message
from skerry_syncer.store.errors import ObjectMissingError
from skerry_syncer.store.log.entries import (
    INITIAL_BASE,
    AcceptedItem,
    CommittedItem,
    EjectionItem,
    Fate,
    Item,
    PolicyItem,
    RunStatus,
    SessionItem,
    entry_name,
)
from skerry_syncer.store.log.run_log import RunLog
from skerry_syncer.store.log.state import DeltaState, RunState
from skerry_syncer.store.maintenance.checking import verify_run
from skerry_syncer.store.versions.blobs import Blobs, frame_batches
from skerry_syncer.store.versions.scratch import Scratch
from tests.simulation.collected import Collections, with_deleted
from tests.simulation.evidence import Evidence, open_run, state_digest
from tests.simulation.records import LearnerRecord
from tests.support.decoding import decode_frames
from tests.support.whole_history import WholeHistory

_FATES: Final = {
    types_pb2.FATE_MERGED: Fate.MERGED,
    types_pb2.FATE_SUPERSEDED: Fate.SUPERSEDED,
    types_pb2.FATE_EXPIRED: Fate.EXPIRED,
    types_pb2.FATE_QUARANTINED: Fate.QUARANTINED,
}
_LONGEST_ROUND_STEPS: Final = 12
# What float32 loses on weights of this size over one round's steps.
_ROUNDING: Final = 1e-3
# A step, with who trained it.
_Step: TypeAlias = tuple[str, int]
# Half a quantisation step, as a share of the largest value; float32, which vectors take, is exact.
_HALF_STEP: Final = {Codec.FLOAT32: 0.0, Codec.INT8: 0.5 / 127, Codec.INT4: 0.5 / 7}


@dataclass(frozen=True)
class Finding:
    """A rule that a history broke."""

    rule: str
    detail: str

    def __str__(self) -> str:
        """Returns it in one line."""
        return f"{self.rule}: {self.detail}"


async def audit(evidence: Evidence) -> list[Finding]:
    """Returns everything that is wrong with a run; nothing, if all is well."""
    findings = [Finding("nothing fails by a defect", complaint) for complaint in evidence.complaints]
    try:
        run = await open_run(evidence.objects)
    except Exception as error:  # noqa: BLE001 - any failure to read the log is a finding
        return [*findings, Finding("the log can be read", repr(error))]
    log = run.log
    history, collections = WholeHistory(log.spec), Collections(evidence, run)
    admitted = []
    async for entry, data in log.entries():
        items = [one.item for one in history.apply(entry, data) if one.rejection is None]
        admitted += items
        rule = "no collection takes what a replica that catches up needs"
        findings += [Finding(rule, detail) for item in items for detail in collections.admitted(history.state, item)]
        rule = "what was the newest within the policy's hours stays"
        findings += [Finding(rule, detail) for item in items for detail in collections.too_early(history.state, item)]
    findings += [Finding("what is deleted was condemned before", name) for name in collections.deletions()]
    findings += [Finding("what the policy keeps is there", detail) async for detail in collections.losses()]
    audit_of = _Audit(evidence, log, admitted, history.state, collections.condemned)
    findings += audit_of.findings()
    findings += [finding async for finding in audit_of.contents()]
    findings += [Finding("all replicas fold to the same state", detail) for detail in _differing(evidence, history)]
    report = await verify_run(run, scratch=Scratch(None))
    findings += [Finding("verify finds nothing", str(problem)) for problem in report.problems]
    return findings


def audit_so_far(evidence: Evidence, log: RunLog, admitted: list[Item]) -> list[Finding]:
    """Returns what is wrong with a run that goes on: the rules that hold at every moment, without the contents."""
    return _Audit(evidence, log, admitted, log.state).safety()


def _differing(evidence: Evidence, history: WholeHistory) -> Iterator[str]:
    own = state_digest(history.folded)
    for replica, digest in evidence.state_digests:
        if digest != own:
            yield f"{replica} has {digest}, the log makes {own}"


class _Audit:
    """One run's rules."""

    def __init__(
        self,
        evidence: Evidence,
        log: RunLog,
        admitted: list[Item],
        state: RunState,
        collected: AbstractSet[str] = frozenset(),
    ) -> None:
        self.evidence = evidence
        self.collected = collected  # names of blobs
        self.admitted = admitted  # every item that the fold admitted, in log order
        self.log = log
        self.state = state  # with the whole history
        self.sessions = {item.session for item in admitted if isinstance(item, SessionItem)}  # that ever took over
        self.by_session = {record.session: record for record in evidence.records if record.session}
        # The deltas of each session's fragment, in the order in which they were accepted.
        self.histories: dict[tuple[str, str], list[DeltaState]] = defaultdict(list)
        for delta in self.state.deltas.values():
            if delta.item.base_version != INITIAL_BASE:
                self.histories[delta.item.session, delta.item.fragment].append(delta)

    def findings(self) -> list[Finding]:
        """Returns what the log and the records of a run that is over say."""
        return [
            *self.safety(),
            *self._every_delta_has_its_fate(),
            *self._followers_have_the_weights(),
            *self._nothing_is_lost(),
            *self._everything_moves(),
        ]

    def safety(self) -> list[Finding]:
        """Returns what broke a rule that holds at every moment."""
        return [
            *self._acknowledged_is_in_the_log(),
            *self._accepted_was_sent(),
            *self._fenced_sessions_are_refused(),
            *self._ejected_learners_are_out(),
            *self._bases_are_used_once(),
            *self._nothing_is_superseded(),
            *self._steps_are_merged_once(),
            *self._versions_are_continuous(),
            *self._policy_changes_are_kept(),
            *self._learners_are_well(),
        ]

    # Safety.

    def _nothing_is_superseded(self) -> Iterator[Finding]:
        for delta in self.state.deltas.values():
            if delta.fate is Fate.SUPERSEDED:
                detail = f"{delta.item.delta} of {delta.item.learner} in {delta.item.fragment}"
                yield Finding("no process supersedes the work of the one before", detail)

    def _acknowledged_is_in_the_log(self) -> Iterator[Finding]:
        rule = "every acknowledged delta was in the log before"
        for record in self.evidence.records:
            for delta, heard_at in record.acknowledged.items():
                known = self.state.deltas.get(delta)
                if known is None:
                    yield Finding(rule, f"{record.learner}'s {delta} is not there")
                elif self._landed(known.position) > heard_at:
                    yield Finding(rule, f"{record.learner}'s {delta} landed after it was acknowledged")

    def _accepted_was_sent(self) -> Iterator[Finding]:
        rule = "every accepted delta is one that its learner sent"
        for delta in self.state.deltas.values():
            if delta.item.base_version == INITIAL_BASE:
                continue
            record = self.by_session.get(delta.item.session)
            header = None if record is None else record.headers.get(delta.item.delta)
            if record is None or header is None:
                yield Finding(rule, f"nobody sent {delta.item.delta} of {delta.item.learner}")
                continue
            claimed = (header.learner_id, header.fragment, header.base_version, header.step_count, header.last_step)
            logged = (
                delta.item.learner,
                delta.item.fragment,
                delta.item.base_version,
                delta.item.step_count,
                delta.item.last_step,
            )
            if claimed != logged or delta.item.last_step > record.step_count:
                yield Finding(rule, f"{delta.item.delta} was sent as {claimed}, logged as {logged}")

    def _fenced_sessions_are_refused(self) -> Iterator[Finding]:
        sessions: dict[str, list[str]] = defaultdict(list)  # by learner, in the order in which they came
        for item in self.admitted:
            if isinstance(item, SessionItem) and item.session not in sessions[item.learner]:
                sessions[item.learner].append(item.session)
            if not isinstance(item, AcceptedItem) or item.base_version == INITIAL_BASE:
                continue
            if sessions[item.learner][-1:] != [item.session]:
                yield Finding("no delta of a fenced session is accepted", f"{item.delta} of {item.learner} was")

    def _ejected_learners_are_out(self) -> Iterator[Finding]:
        merged: dict[tuple[str, int], set[str]] = defaultdict(set)  # learners by fragment and version
        for delta in self.state.deltas.values():
            if delta.fate is Fate.MERGED:
                merged[delta.item.fragment, delta.version].add(delta.item.learner)
        out: set[str] = set()
        for item in self.admitted:
            learners: set[str] = set()
            match item:
                case EjectionItem():
                    (out.add if item.is_ejected else out.discard)(item.learner)
                case SessionItem() | AcceptedItem():
                    learners = {item.learner}
                case CommittedItem():
                    learners = merged[item.fragment, item.version]
            for learner in sorted(learners & out):
                yield Finding("an ejected learner takes no part", f"{learner} has a part in an item {item.kind}")

    def _bases_are_used_once(self) -> Iterator[Finding]:
        for (session, fragment), history in self.histories.items():
            kept = [
                delta for delta in history if delta.fate in {Fate.PENDING, Fate.MERGED}
            ]  # after any other fate the base may be used again
            for base, count in Counter(delta.item.base_version for delta in kept).items():
                if count > 1:
                    detail = f"{count} deltas of session {session} from version {base} of {fragment} were accepted"
                    yield Finding("one delta of a session is accepted from a base", detail)

    def _steps_are_merged_once(self) -> Iterator[Finding]:
        merged: dict[str, set[_Step]] = defaultdict(set)  # by fragment
        for (session, fragment), history in self.histories.items():
            headers = self.by_session[session].headers if session in self.by_session else {}
            for delta in history:
                if delta.fate is not Fate.MERGED:
                    continue
                # By what the learner itself has sent, where that is known.
                steps = {(session, step) for step in _steps(headers.get(delta.item.delta, delta.item))}
                if twice := steps & merged[fragment]:
                    yield Finding(
                        "every inner step is merged at most once",
                        f"steps {_brief({step for _, step in twice})} of session {session} in {fragment} are merged "
                        "twice",
                    )
                merged[fragment] |= steps

    def _every_delta_has_its_fate(self) -> Iterator[Finding]:
        rule = "every accepted delta has one fate, the one that its learner heard"
        if self.state.status is not RunStatus.CLOSED:
            yield Finding("the run is closed", f"status is {self.state.status}")
            return
        for name, delta in self.state.deltas.items():
            if delta.fate is Fate.PENDING:
                yield Finding(rule, f"{name} has none")
        for record in self.evidence.records:
            for name, heard in record.fates.items():
                known = self.state.deltas.get(name)
                fate = _FATES.get(heard.fate)
                if known is None or fate is None:
                    continue
                if (known.fate, known.version) != (fate, heard.version):
                    said = f"{fate} in version {heard.version}"
                    yield Finding(rule, f"{name} is {known.fate} in {known.version}, {record.learner} heard {said}")

    def _versions_are_continuous(self) -> Iterator[Finding]:
        for name, fragment in self.state.fragments.items():
            if sorted(fragment.versions) != list(range(fragment.version + 1)):
                yield Finding("versions are continuous", f"{name} has {sorted(fragment.versions)}")

    def _policy_changes_are_kept(self) -> Iterator[Finding]:
        changes = [item for item in self.admitted if isinstance(item, PolicyItem)]
        for before, change in pairwise(changes):
            asked = self.evidence.policy_changes.get(change.request_id)
            if asked is not None and change.policy != policy_from_message(asked, before.policy):
                yield Finding("a change of the policy changes nothing else", f"request {change.request_id} did")

    def _followers_have_the_weights(self) -> Iterator[Finding]:
        for adopted in self.evidence.adopted:
            version = self.state.fragments[adopted.fragment].versions.get(adopted.version)
            if version is None or version.digest != adopted.digest:
                yield Finding("followers have the run's weights to the bit", f"{adopted}, the log has {version}")

    def _learners_are_well(self) -> Iterator[Finding]:
        for record in self.evidence.records:
            who = f"{record.learner}.{record.incarnation}"
            if record.longest_stall_s > 0:
                yield Finding("no learner waits in a step", f"{who} waited {record.longest_stall_s} s")
            for contradiction in record.contradictions:
                yield Finding("nothing fails by a defect", f"{who}: {contradiction}")
            failure = record.failure
            if failure is not None and not self._is_fair(record, failure.reason):
                yield Finding("no learner is stopped without cause", f"{who}: {failure.reason}: {failure}")

    def _is_fair(self, record: LearnerRecord, reason: str) -> bool:
        """Whether a learner had to stop."""
        if reason == "RUN_CLOSED":
            return self.evidence.plan.mix.closes_under_fire
        if reason == "EJECTED":
            return any(isinstance(item, EjectionItem) and item.learner == record.learner for item in self.admitted)
        return reason == "SESSION_FENCED" and record.may_be_fenced and record.session in self.sessions

    def _nothing_is_lost(self) -> Iterator[Finding]:
        """Finds work of learners that flushed and left that is not merged, and whose fate the log does not explain."""
        if self.evidence.plan.mix.closes_under_fire:
            return
        for record in self.evidence.records:
            if not record.has_flushed or record.is_dirty or record.failure is not None:
                continue
            for fragment in self.state.fragments:
                lost = self._unmerged(record, fragment, record.step_count)
                history = self.histories.get((record.session, fragment), ())
                named = [delta for delta in history if delta.fate is not Fate.MERGED]
                if lost := lost & _without(record.step_count, named):
                    detail = f"{record.learner}.{record.incarnation} lost steps {_brief(lost)} of {fragment}"
                    yield Finding("no work of a learner that flushed and left is lost", detail)

    # Liveness.

    def _everything_moves(self) -> Iterator[Finding]:
        evidence = self.evidence
        if evidence.calm_begin_count is None:
            return
        for name, fragment in self.state.fragments.items():
            landings = [self._landed(version.position) for version in fragment.versions.values()]
            if not any(evidence.calm_begin_count < landed <= evidence.calm_end_count for landed in landings):
                yield Finding("every fragment moves once nothing fails", f"{name} did not within {evidence.calm_s} s")
        yield from self._everybody_takes_part()
        for record in evidence.records:
            if record.steps_when_calm is None or not record.is_newest or record.is_dirty or record.failure is not None:
                continue
            for name in self.state.fragments:
                left = self._unmerged(record, name, record.steps_when_calm, until=evidence.calm_end_count)
                if left:
                    detail = f"{record.learner}.{record.incarnation}'s steps {_brief(left)} of {name} are not"
                    yield Finding(f"all work is merged within {evidence.calm_s} s once nothing fails", detail)

    def _everybody_takes_part(self) -> Iterator[Finding]:
        """Finds learners that trained during the calm and had nothing merged after it began."""
        begin = self.evidence.calm_begin_count or 0
        for record in self.evidence.records:
            if not record.has_left or not record.is_newest or record.failure is not None:
                continue
            if record.step_count < 2 * _LONGEST_ROUND_STEPS:
                continue
            for fragment in self.state.fragments:
                deltas = [one for one in self.histories[record.session, fragment] if one.fate is Fate.MERGED]
                if not any(self._landed(delta.position) > begin for delta in deltas):
                    detail = f"{record.learner}.{record.incarnation} does not in {fragment}"
                    yield Finding("everybody takes part again once nothing fails", detail)

    def _unmerged(self, record: LearnerRecord, fragment: str, steps: int, *, until: int | None = None) -> set[int]:
        """Returns the steps up to `steps` that no version has, or none that landed by `until`."""
        versions = self.state.fragments[fragment].versions
        deltas = [
            delta
            for delta in self.histories.get((record.session, fragment), ())
            if delta.fate is Fate.MERGED and (until is None or self._landed(versions[delta.version].position) <= until)
        ]
        return _without(steps, deltas)

    def _landed(self, position: int) -> int:
        return self.evidence.landed[entry_name(self.log.prefix, position)]

    # Contents.

    async def contents(self) -> AsyncIterator[Finding]:
        """Yields deltas that do not hold the steps that they claim, read from what they hold."""
        for (session, fragment), history in self.histories.items():
            record = self.by_session.get(session)
            if record is None or record.is_dirty:
                continue
            sent = np.zeros(self.log.spec.fragment(fragment).numel)
            for delta in history:
                try:
                    values = await self._decoded(delta)
                except ObjectMissingError as error:
                    # Evidence of real processes does not have what a collection has deleted.
                    if self.collected.isdisjoint(part.name for part in delta.item.parts):
                        yield Finding("what was accepted stays until it is collected", f"{delta.item.delta}: {error}")
                    if delta.fate is Fate.MERGED:
                        break  # what later deltas hold depends on it
                    continue
                expected = -self._work(record, fragment, 0, delta.item.last_step) - sent
                largest = float(np.abs(values).max())
                half_step = _HALF_STEP[self.log.state.policy.delta_encoding.codec]
                off = float(np.abs(values - expected).max())
                if off > _ROUNDING + 1.02 * half_step * largest:
                    yield Finding(
                        "every delta holds the steps that it claims",
                        f"{delta.item.delta} of {record.learner}.{record.incarnation} in {fragment}, up to step "
                        f"{delta.item.last_step}, is off by {off:.4f} where {half_step * largest:.4f} is allowed",
                    )
                    break
                if delta.fate is Fate.MERGED:
                    sent += values

    def _work(self, record: LearnerRecord, fragment: str, begin: int, end: int) -> NDArray[np.float64]:
        tensors = self.log.spec.fragment(fragment).tensors
        return np.concatenate([record.work[tensor.name][end] - record.work[tensor.name][begin] for tensor in tensors])

    @cached_property
    def _blobs(self) -> Blobs:
        """The run's blobs, with those that were collected."""
        objects, entropy = with_deleted(self.evidence), self.log.entropy
        return Blobs(objects, self.log.prefix, entropy, workers=InlineWorkers(), condemned=())

    async def _decoded(self, delta: DeltaState) -> NDArray[np.float64]:
        layout = self.log.spec.fragment(delta.item.fragment)
        values = np.empty(layout.numel, np.float32)
        for part in delta.item.parts:
            pieces = self._blobs.part_frames(part)
            async for batch in frame_batches(pieces, part.first, part.numel):
                out = values[batch.first : batch.first + batch.numel]
                decode_frames(batch.data, layout, out, first=batch.first)
        return values.astype(np.float64)


def _without(step_count: int, deltas: Iterable[DeltaState]) -> set[int]:
    """Returns the steps of a process up to `step_count` that are in none of its deltas."""
    return set(range(1, step_count + 1)).difference(*(_steps(delta.item) for delta in deltas))


def _steps(sent: AcceptedItem | exchange_pb2.PushHeader) -> set[int]:
    return set(range(sent.last_step - sent.step_count + 1, sent.last_step + 1))


def _brief(steps: set[int]) -> Any:
    ordered = sorted(steps)
    return ordered if len(ordered) < 6 else f"{ordered[0]}..{ordered[-1]} ({len(ordered)})"
