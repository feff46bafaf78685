"""The demo's figures, all of them measured, and the claims that they have to bear out."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from skerry.demo.follow import MetricsFollower
from skerry.demo.history import History
from skerry.demo.judgement import JudgedPosition
from skerry.demo.plan import DemoPlan
from skerry.demo.scenario import Timeline
from skerry.store.log.entries import Fate

MAX_BITS_UP: Final = 5.0
MAX_BITS_DOWN: Final = 9.0
MAX_STALL_MS: Final = 50.0


@dataclass(frozen=True)
class Check:
    """A claim about the demo. A failed one that `is_required` makes the demo fail; another is only said."""

    name: str
    is_met: bool
    detail: str
    is_required: bool = True


@dataclass(frozen=True)
class LearnerFigures:
    """One learner's share, over all of its processes."""

    learner_id: str
    region: str
    slowdown: float
    steps: int
    tokens: int
    process_count: int
    final_loss: float | None
    """Held-out loss of the island's own weights when it last measured them."""
    median_step_ms: float
    """Of the computation alone, without the time slept to emulate slower hardware."""
    median_stall_ms: float
    max_stall_ms: float
    max_stall_cpu_ms: float
    """Processor time within the longest pause."""
    max_stall_queued_ms: float
    """Time within it that the training thread was ready to run, but others had all processors."""
    bits_per_parameter_up: float
    bits_per_parameter_down: float
    deltas_acknowledged: int
    deltas_merged: int
    """From the log."""


@dataclass(frozen=True)
class Summary:
    """What `summary.json` holds. Times ending in `_at_s` count from the islands' first step."""

    merged_loss: float
    """Held-out loss of the merged model at the end of the log, in nats a byte."""
    single_loss: float
    """Held-out loss of one learner alone, after as many tokens as the first island had."""
    initial_loss: float
    """Held-out loss of version 0 of all fragments."""
    island_losses: Mapping[str, float]
    versions_committed: int
    deltas_acknowledged: int
    """What the learners counted, a killed one's count included, which survives in its metrics."""
    deltas_merged: int
    deltas_named_unmerged: int
    deltas_pending: int
    deltas_accepted_unheard: int
    """In the log, but whoever sent it was killed before the answer reached its metrics."""
    deltas_by_fate: Mapping[str, int]
    ledger_balances: bool
    bits_per_parameter_up: float
    bits_per_parameter_down: float
    bytes_up: int
    bytes_down: int
    parameters_up: int
    parameters_down: int
    delta_bytes_in_store: int
    update_bytes_in_store: int
    max_step_stall_ms: float
    max_step_stall_cpu_ms: float
    max_step_stall_queued_ms: float
    max_step_stall_learner: str
    max_step_stall_at_s: float
    p99_step_stall_ms: float
    median_step_ms: float
    """Of the first island, while three islands and a syncer share the machine."""
    single_median_step_ms: float
    learner_killed_at_s: float
    learner_back_at_s: float
    syncer_killed_at_s: float
    syncer_back_at_s: float
    islands_ended_at_s: float
    closed_at_s: float
    steps_without_syncer: int
    """Inner steps that all islands took while there was no syncer."""
    verify_ok: bool
    steps: int
    tokens_per_learner: int
    single_tokens: int
    parameter_count: int
    fragment_count: int
    inner_step_count: int
    islands: Sequence[LearnerFigures]
    duration_s: float
    core_count: int
    load_average: float
    checks: Sequence[Check]

    @property
    def failures(self) -> list[Check]:
        """Required claims that the figures don't bear out."""
        return [check for check in self.checks if check.is_required and not check.is_met]


@dataclass(frozen=True)
class Evidence:
    """Everything that the figures are drawn from."""

    plan: DemoPlan
    timeline: Timeline
    single: MetricsFollower
    learners: Mapping[str, MetricsFollower]
    history: History
    merged: Sequence[JudgedPosition]
    """The merged model over the run, the last being its end."""
    initial_loss: float
    single_loss: float
    verify_ok: bool
    parameter_count: int
    duration_s: float
    core_count: int
    load_average: float

    def since_start_s(self, unix_s: float | None) -> float:
        """Seconds since the islands' first step."""
        assert unix_s is not None, "the scenario ran to its end"
        assert self.timeline.started is not None, "the scenario ran to its end"
        return unix_s - self.timeline.started


def summarise(evidence: Evidence) -> Summary:
    """All figures of a demo that ran to its end."""
    plan, history, timeline = evidence.plan, evidence.history, evidence.timeline
    finals = [line for follower in evidence.learners.values() for line in follower.final_of_attempts()]
    bytes_up, parameters_up = sum(line.bytes_up for line in finals), sum(line.parameters_up for line in finals)
    bytes_down, parameters_down = sum(line.bytes_down for line in finals), sum(line.parameters_down for line in finals)
    lines = [line for follower in evidence.learners.values() for line in follower.lines]
    worst = max(lines, key=lambda line: line.sync_stall_ms)
    stalls_ms = sorted(line.sync_stall_ms for line in lines)
    timekeeper = evidence.learners[plan.timekeeper.learner_id]
    assert timeline.ended is not None, "the scenario ran to its end"
    acknowledged = sum(line.deltas_acknowledged for line in finals)
    deltas, versions, counts = history.deltas, history.versions, history.counts_by_fate()
    unheard = max(0, len(deltas) - acknowledged)
    islands = [_learner_figures(evidence, index) for index in range(len(plan.islands))]
    summary = Summary(
        merged_loss=evidence.merged[-1].loss,
        single_loss=evidence.single_loss,
        initial_loss=evidence.initial_loss,
        island_losses={figures.learner_id: figures.final_loss for figures in islands if figures.final_loss is not None},
        versions_committed=len(versions),
        deltas_acknowledged=acknowledged,
        deltas_merged=counts[Fate.MERGED],
        deltas_named_unmerged=len(deltas) - counts[Fate.MERGED] - counts[Fate.PENDING],
        deltas_pending=counts[Fate.PENDING],
        deltas_accepted_unheard=unheard,
        deltas_by_fate={fate.value: count for fate, count in counts.items()},
        ledger_balances=_balances(evidence, acknowledged),
        bits_per_parameter_up=_bits(bytes_up, parameters_up),
        bits_per_parameter_down=_bits(bytes_down, parameters_down),
        bytes_up=bytes_up,
        bytes_down=bytes_down,
        parameters_up=parameters_up,
        parameters_down=parameters_down,
        delta_bytes_in_store=sum(part.size_bytes for delta in deltas for part in delta.item.parts),
        update_bytes_in_store=sum(part.size_bytes for version in versions for part in version.item.update),
        max_step_stall_ms=worst.sync_stall_ms,
        max_step_stall_cpu_ms=worst.sync_cpu_ms,
        max_step_stall_queued_ms=worst.sync_queued_ms,
        max_step_stall_learner=worst.learner,
        max_step_stall_at_s=evidence.since_start_s(worst.unix_s),
        p99_step_stall_ms=stalls_ms[int(0.99 * (len(stalls_ms) - 1))],
        median_step_ms=statistics.median(line.step_time_ms for line in timekeeper.lines),
        single_median_step_ms=statistics.median(line.step_time_ms for line in evidence.single.lines),
        learner_killed_at_s=evidence.since_start_s(timeline.learner_killed),
        learner_back_at_s=evidence.since_start_s(timeline.learner_back),
        syncer_killed_at_s=evidence.since_start_s(timeline.syncer_killed),
        syncer_back_at_s=evidence.since_start_s(timeline.syncer_back),
        islands_ended_at_s=evidence.since_start_s(timeline.ended),
        closed_at_s=evidence.since_start_s(timeline.closed),
        steps_without_syncer=_steps_without_syncer(evidence),
        verify_ok=evidence.verify_ok,
        steps=plan.step_count,
        tokens_per_learner=max(line.tokens for line in timekeeper.lines if line.unix_s <= timeline.ended),
        single_tokens=evidence.single.lines[-1].tokens,
        parameter_count=evidence.parameter_count,
        fragment_count=len(history.state.fragments),
        inner_step_count=plan.training.inner_step_count,
        islands=islands,
        duration_s=evidence.duration_s,
        core_count=evidence.core_count,
        load_average=evidence.load_average,
        checks=(),
    )
    return replace(summary, checks=_checks(summary))


def _balances(evidence: Evidence, acknowledged: int) -> bool:
    """Every delta in the log has a final fate, and the learners counted what the log has, session by session.

    Only a process that was killed may know of fewer than the log: its last answers died with it.
    """
    deltas = evidence.history.deltas
    if any(delta.fate is Fate.PENDING for delta in deltas) or acknowledged > len(deltas):
        return False
    for learner_id, follower in evidence.learners.items():
        in_log = sum(delta.item.learner == learner_id for delta in deltas)
        counted = sum(line.deltas_acknowledged for line in follower.final_of_attempts())
        was_killed = learner_id == evidence.plan.killed_learner_id
        if counted > in_log or (counted < in_log and not was_killed):
            return False
    return True


def _learner_figures(evidence: Evidence, index: int) -> LearnerFigures:
    island = evidence.plan.islands[index]
    follower = evidence.learners[island.learner_id]
    finals = follower.final_of_attempts()
    worst = max(follower.lines, key=lambda line: line.sync_stall_ms)
    evaluated = [loss for _, loss in follower.evaluations]
    return LearnerFigures(
        learner_id=island.learner_id,
        region=island.region,
        slowdown=island.slowdown,
        steps=follower.lines[-1].step,
        tokens=follower.lines[-1].tokens,
        process_count=len(finals),
        final_loss=evaluated[-1] if evaluated else None,
        median_step_ms=statistics.median(line.step_time_ms for line in follower.lines),
        median_stall_ms=statistics.median(line.sync_stall_ms for line in follower.lines),
        max_stall_ms=worst.sync_stall_ms,
        max_stall_cpu_ms=worst.sync_cpu_ms,
        max_stall_queued_ms=worst.sync_queued_ms,
        bits_per_parameter_up=_bits(sum(line.bytes_up for line in finals), sum(line.parameters_up for line in finals)),
        bits_per_parameter_down=_bits(
            sum(line.bytes_down for line in finals),
            sum(line.parameters_down for line in finals),
        ),
        deltas_acknowledged=sum(line.deltas_acknowledged for line in finals),
        deltas_merged=sum(
            delta.fate is Fate.MERGED and delta.item.learner == island.learner_id for delta in evidence.history.deltas
        ),
    )


def _steps_without_syncer(evidence: Evidence) -> int:
    killed, back = evidence.timeline.syncer_killed, evidence.timeline.syncer_back
    assert killed is not None, "the scenario ran to its end"
    assert back is not None, "the scenario ran to its end"
    steps = {
        (line.learner, line.attempt, line.step)
        for follower in evidence.learners.values()
        for line in follower.lines
        if killed < line.unix_s < back
    }
    return len(steps)


def _bits(size_bytes: int, parameter_count: int) -> float:
    return 8 * size_bytes / parameter_count if parameter_count else 0.0


def _checks(summary: Summary) -> list[Check]:
    named = summary.deltas_merged + summary.deltas_named_unmerged
    unheard = summary.deltas_accepted_unheard
    return [
        Check(
            "more learners help",
            summary.merged_loss < summary.single_loss,
            f"held-out loss {summary.merged_loss:.3f} merged, {summary.single_loss:.3f} alone with the same tokens",
        ),
        Check("every version replays", summary.verify_ok, f"{summary.versions_committed} versions, by skerry verify"),
        Check(
            "every acknowledged delta is accounted for",
            summary.ledger_balances,
            f"{summary.deltas_acknowledged} acknowledged"
            + (f" + {unheard} that the killed learner heard nothing of" if unheard else "")
            + f" = {summary.deltas_merged} merged + {summary.deltas_named_unmerged} named ({named})"
            + (f", {summary.deltas_pending} without a fate" if summary.deltas_pending else ""),
        ),
        Check(
            "four bits up",
            0 < summary.bits_per_parameter_up <= MAX_BITS_UP,
            f"{summary.bits_per_parameter_up:.2f} bits a parameter and delta; at most {MAX_BITS_UP:.0f}",
            is_required=False,
        ),
        Check(
            "four bits down",
            0 < summary.bits_per_parameter_down <= MAX_BITS_DOWN,
            f"{summary.bits_per_parameter_down:.2f} bits a parameter and version; at most {MAX_BITS_DOWN:.0f}",
            is_required=False,
        ),
        Check(
            "nobody waits",
            summary.max_step_stall_ms <= MAX_STALL_MS,
            f"longest pause {summary.max_step_stall_ms:.1f} ms: {summary.max_step_stall_cpu_ms:.1f} ms computing, "
            f"{summary.max_step_stall_queued_ms:.1f} ms ready while others had all {summary.core_count} cores, the "
            f"rest at a lock; at most {MAX_STALL_MS:.0f} ms",
            is_required=False,
        ),
        Check(
            "training went on without the syncer",
            summary.steps_without_syncer > 0,
            f"{summary.steps_without_syncer} inner steps in "
            f"{summary.syncer_back_at_s - summary.syncer_killed_at_s:.1f} s",
            is_required=False,
        ),
    ]
