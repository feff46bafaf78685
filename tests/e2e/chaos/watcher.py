"""Holds the log against the learners' own accounts, all the time: it reads the store past all faults.

A look reads every journal, then the log to its end, then the journals again for what was sent meanwhile. So what a
learner had heard before the look must be in the log after it, and what the log accepted must be in a journal.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from skerry_syncer.store.errors import RunNotFoundError
from skerry_syncer.store.log.entries import INITIAL_BASE, Entry, Fate, Item, entry_name
from skerry_syncer.store.log.fold import apply_entry
from skerry_syncer.store.log.run_log import RunLog
from skerry_syncer.store.log.state import Outcome, RunState
from skerry_syncer.store.objects.interface import Objects
from tests.e2e.chaos.journal import Account
from tests.e2e.chaos.learner import POLICY
from tests.simulation.auditor import Finding, audit, audit_so_far
from tests.simulation.disturbances import Mix
from tests.simulation.evidence import Evidence, open_run
from tests.simulation.learner_process import RUN
from tests.simulation.world import Plan
from tests.support.dict_objects import DictObjects

# Once nothing fails: a ping that stays unanswered, and a few rounds.
CALM_S: Final = 90.0
_READS_AT_ONCE: Final = 16


class Watcher:
    """The auditor of one deployment."""

    def __init__(self, objects: Objects, *, seed: int, say: Callable[[str], None]) -> None:
        self.accounts: list[Account] = []
        self.complaints: list[str] = []
        self.findings: list[Finding] = []
        self.look_count = 0
        self.still_open: list[str] = []  # what the calm is waited for
        self._plan = Plan(seed, Mix("chaos"), (), POLICY)
        self._objects = objects
        self._say = say
        self._log: RunLog | None = None
        self._landed: dict[int, int] = {}  # by position: the look that found it
        self._admitted: list[Item] = []
        self._calm_begin: int | None = None
        self._calm_end = 0

    @property
    def state(self) -> RunState | None:
        """The fold of the log; None before the run exists."""
        return None if self._log is None else self._log.state

    async def look(self) -> None:
        """Audits what there is now, and says what was not found before."""
        self._read()
        if self._log is None:
            await self._open()
        if self._log is None:
            return
        await self._log.tail()
        self.look_count += 1
        self._read(holds_fates=True)
        self._report(audit_so_far(self._evidence(), self._log, self._admitted))

    def _report(self, findings: list[Finding]) -> None:
        known = {str(finding) for finding in self.findings}
        for finding in findings:
            if str(finding) not in known:
                self._say(f"FOUND {finding}")
                self.findings.append(finding)

    def begin_calm(self) -> None:
        """Notes that nothing fails any more, and how far everybody has trained."""
        self._read()
        self._calm_begin = self._calm_end = self.look_count
        for account in self.accounts:
            account.record.steps_when_calm = account.record.step_count

    def has_begun(self) -> bool:
        """Whether everybody has joined."""
        return bool(self.accounts) and all(account.record.session for account in self.accounts)

    def has_calmed(self) -> bool:
        """Whether every fragment has moved since the calm began, and what was trained before it is merged."""
        self._calm_end = self.look_count
        state = self.state
        if state is None:
            return False
        merged: Counter[tuple[str, str]] = Counter()
        for delta in state.deltas.values():
            if delta.fate is Fate.MERGED:
                key = (delta.item.session, delta.item.fragment)
                merged[key] = max(merged[key], delta.item.last_step)
        self.still_open = [
            f"{record.learner}.{record.incarnation} in {name}: {merged[record.session, name]} of "
            f"{record.steps_when_calm} steps"
            for record in (account.record for account in self.accounts)
            if record.is_newest and record.failure is None
            for name in state.fragments
            if not record.session or merged[record.session, name] < (record.steps_when_calm or 0)
        ] + [
            f"{name} has no new version"
            for name, fragment in state.fragments.items()
            if self._landed[max(version.position for version in fragment.versions.values())] <= (self._calm_begin or 0)
        ]
        return not self.still_open

    async def audit_all(self) -> list[Finding]:
        """Audits a run that is over: contents, fates, and that everything can be verified."""
        await self.look()
        for account in self.accounts:
            account.load_work()
        self._report(await audit(replace(self._evidence(), objects=await self._copied())))
        return self.findings

    async def _copied(self) -> DictObjects:
        """Returns the run's objects as they are now, in memory: an audit reads many of them again and again."""
        copy, limit = DictObjects(), asyncio.Semaphore(_READS_AT_ONCE)

        async def take(name: str) -> None:
            async with limit:
                await copy.create(name, await self._objects.get(name))

        names = [info.name async for info in self._objects.list(f"runs/{RUN}")]
        await asyncio.gather(*map(take, names))
        return copy

    def counts(self) -> dict[str, int | dict[str, int]]:
        """Returns what the report says of the log and the accounts."""
        state = self.state
        deltas = [] if state is None else list(state.deltas.values())
        fates = Counter(str(delta.fate) for delta in deltas if delta.item.base_version != INITIAL_BASE)
        return {
            "versions": 0 if state is None else sum(fragment.version for fragment in state.fragments.values()),
            "deltas": dict(sorted(fates.items())),
            "deltas_acknowledged": sum(len(account.record.acknowledged) for account in self.accounts),
            "learner_processes": len(self.accounts),
            "steps_audited": sum(account.record.step_count for account in self.accounts),
            "looks": self.look_count,
        }

    async def _open(self) -> None:
        try:
            log = (await open_run(self._objects)).log
        except RunNotFoundError:
            return
        replayed = RunState(log.spec)
        async for entry, data in log.entries(stop=log.state.position + 1):
            self._take(entry, apply_entry(replayed, entry, data))
        log.subscribe(self._take)
        self._log = log

    def _take(self, entry: Entry, outcomes: tuple[Outcome, ...]) -> None:
        self._landed[entry.position] = self.look_count
        self._admitted += [outcome.item for outcome in outcomes if outcome.rejection is None]

    def _read(self, *, holds_fates: bool = False) -> None:
        for account in self.accounts:
            account.read(lambda: self.look_count, holds_fates=holds_fates)

    def _evidence(self) -> Evidence:
        prefix = "" if self._log is None else self._log.prefix
        return Evidence(
            plan=self._plan,
            objects=self._objects,
            landed_at_s={},
            landed={entry_name(prefix, position): count for position, count in self._landed.items()},
            deleted={},  # the policy keeps everything
            calm_begin_count=self._calm_begin,
            calm_end_count=self._calm_end,
            calm_s=CALM_S,
            adopted=tuple(adopted for account in self.accounts for adopted in account.adopted),
            records=tuple(account.record for account in self.accounts),
            state_digests=(),
            policy_changes={},
            complaints=tuple(self.complaints),
        )
