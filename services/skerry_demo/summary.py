"""The figures of the demo, all of them measured, and the checks that they must pass."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from skerry_demo.follow import MetricsFollower
from skerry_demo.history import History
from skerry_demo.judgement import JudgedPosition
from skerry_demo.plan import DemoPlan, LearnerPlan
from skerry_demo.scenario import Timeline
from skerry_syncer.store.log.entries import Fate

MAX_BITS_UP: Final = 5.0
MAX_BITS_DOWN: Final = 9.0
MAX_STALL_MS: Final = 50.0


@dataclass(frozen=True)
class Measured:
    """What is measured once, after the learners have ended."""

    initial_loss: float
    """Held-out loss of version 0 of all fragments."""
    single_loss: float
    """Held-out loss of the single-learner baseline, after as many tokens as the first learner had."""
    verify_ok: bool
    parameter_count: int
    duration_s: float
    core_count: int
    load_average: float


@dataclass(frozen=True)
class Evidence(Measured):
    """Everything that the figures are computed from."""

    plan: DemoPlan
    timeline: Timeline
    single: MetricsFollower
    learners: Mapping[str, MetricsFollower]
    history: History
    merged: Sequence[JudgedPosition]
    """The merged model over the run; the last one is the final model."""


@dataclass(frozen=True)
class Check:
    """A claim about the demo. The demo fails if a required one is not met."""

    name: str
    is_met: bool
    detail: str
    is_required: bool = True


@dataclass(frozen=True)
class ExchangeFigures:
    """What one learner, or all of them, sent and received. Every process of a restarted learner counts."""

    bytes_up: int
    bytes_down: int
    parameters_up: int
    parameters_down: int
    bits_per_parameter_up: float
    bits_per_parameter_down: float
    deltas_acknowledged: int
    """As the learners counted them."""
    deltas_merged: int
    """As the log has them."""


@dataclass(frozen=True)
class LearnerFigures(ExchangeFigures):
    """One learner."""

    learner_id: str
    region: str
    slowdown: float
    steps: int
    tokens: int
    process_count: int
    final_loss: float | None
    """Held-out loss of the learner's own weights when it last measured it."""
    median_step_ms: float
    """Of the computation alone, without the time slept to emulate slower hardware."""
    median_stall_ms: float
    max_stall_ms: float


@dataclass(frozen=True)
class Summary(Measured, ExchangeFigures):
    """The content of `summary.json`. Times ending in `_at_s` count from the learners' first step."""

    merged_loss: float
    """Held-out loss of the merged model at the end of the log, in nats a byte."""
    versions_committed: int
    deltas_named_unmerged: int
    """Superseded, expired or quarantined."""
    deltas_pending: int
    deltas_accepted_unheard: int
    """In the log, but their learner was killed before the acknowledgement reached its metrics."""
    deltas_by_fate: Mapping[str, int]
    ledger_balances: bool
    """Every delta in the log has its fate, and the learners' counts match the log."""
    delta_bytes_in_store: int
    update_bytes_in_store: int
    max_step_stall_ms: float
    max_step_stall_cpu_ms: float
    """Processor time within the longest pause."""
    max_step_stall_queued_ms: float
    """Time within it that the training thread was ready to run while other threads had all cores."""
    max_step_stall_learner: str
    max_step_stall_at_s: float
    p99_step_stall_ms: float
    median_step_ms: float
    """Of the first learner, while three learners and a syncer share the machine."""
    single_median_step_ms: float
    learner_killed_at_s: float
    learner_back_at_s: float
    syncer_killed_at_s: float
    syncer_back_at_s: float
    ended_at_s: float
    closed_at_s: float
    steps_without_syncer: int
    """Inner steps that all learners took while no syncer ran."""
    steps: int
    tokens_per_learner: int
    single_tokens: int
    fragment_count: int
    inner_step_count: int
    learners: Sequence[LearnerFigures]
    checks: Sequence[Check] = ()

    @property
    def failures(self) -> list[Check]:
        """Required checks that are not met."""
        return [check for check in self.checks if check.is_required and not check.is_met]


def summarise(evidence: Evidence) -> Summary:
    """All figures of a demo that ran to its end."""
    plan, history, timeline = evidence.plan, evidence.history, evidence.timeline
    deltas, versions, counts = history.deltas, history.versions, history.counts_by_fate()
    exchange = _exchange_figures(evidence, list(evidence.learners))
    lines = [line for follower in evidence.learners.values() for line in follower.lines]
    worst = max(lines, key=lambda line: line.sync_stall_ms)
    times_s: dict[str, Any] = {f"{one}_at_s": timeline.at_s(one) for one in timeline.events if one != "started"}
    timekeeper = evidence.learners[plan.timekeeper.learner_id]
    summary = Summary(
        **exchange,
        **{item.name: getattr(evidence, item.name) for item in fields(Measured)},
        **times_s,
        merged_loss=evidence.merged[-1].loss,
        versions_committed=len(versions),
        deltas_named_unmerged=len(deltas) - counts[Fate.MERGED] - counts[Fate.PENDING],
        deltas_pending=counts[Fate.PENDING],
        deltas_accepted_unheard=max(0, len(deltas) - exchange["deltas_acknowledged"]),
        deltas_by_fate={fate.value: count for fate, count in counts.items()},
        ledger_balances=_ledger_balances(evidence),
        delta_bytes_in_store=sum(part.size_bytes for delta in deltas for part in delta.item.parts),
        update_bytes_in_store=sum(part.size_bytes for version in versions for part in version.item.update),
        max_step_stall_ms=worst.sync_stall_ms,
        max_step_stall_cpu_ms=worst.sync_cpu_ms,
        max_step_stall_queued_ms=worst.sync_queued_ms,
        max_step_stall_learner=worst.learner,
        max_step_stall_at_s=timeline.since_start_s(worst.unix_s),
        p99_step_stall_ms=sorted(line.sync_stall_ms for line in lines)[int(0.99 * (len(lines) - 1))],
        median_step_ms=statistics.median(line.step_time_ms for line in timekeeper.lines),
        single_median_step_ms=statistics.median(line.step_time_ms for line in evidence.single.lines),
        steps_without_syncer=_steps_without_syncer(evidence),
        steps=plan.step_count,
        tokens_per_learner=max(line.tokens for line in timekeeper.lines if line.unix_s <= timeline.unix_s("ended")),
        single_tokens=evidence.single.lines[-1].tokens,
        fragment_count=len(history.state.fragments),
        inner_step_count=plan.training.inner_step_count,
        learners=[_learner_figures(evidence, learner) for learner in plan.learners],
    )
    return replace(summary, checks=_checks(summary))


def _learner_figures(evidence: Evidence, learner: LearnerPlan) -> LearnerFigures:
    follower = evidence.learners[learner.learner_id]
    evaluated = [loss for _, loss in follower.evaluations]
    return LearnerFigures(
        **_exchange_figures(evidence, [learner.learner_id]),
        learner_id=learner.learner_id,
        region=learner.region,
        slowdown=learner.slowdown,
        steps=follower.lines[-1].step,
        tokens=follower.lines[-1].tokens,
        process_count=len(follower.final_of_attempts()),
        final_loss=evaluated[-1] if evaluated else None,
        median_step_ms=statistics.median(line.step_time_ms for line in follower.lines),
        median_stall_ms=statistics.median(line.sync_stall_ms for line in follower.lines),
        max_stall_ms=max(line.sync_stall_ms for line in follower.lines),
    )


def _exchange_figures(evidence: Evidence, learner_ids: Sequence[str]) -> dict[str, Any]:
    """The fields of `ExchangeFigures` of these learners together."""
    finals = [line for name in learner_ids for line in evidence.learners[name].final_of_attempts()]
    names = ("bytes_up", "bytes_down", "parameters_up", "parameters_down", "deltas_acknowledged")
    sums = {name: sum(getattr(line, name) for line in finals) for name in names}
    merged = [delta for delta in evidence.history.deltas if delta.fate is Fate.MERGED]
    return {
        **sums,
        "bits_per_parameter_up": 8 * sums["bytes_up"] / max(sums["parameters_up"], 1),
        "bits_per_parameter_down": 8 * sums["bytes_down"] / max(sums["parameters_down"], 1),
        "deltas_merged": sum(delta.item.learner in learner_ids for delta in merged),
    }


def _ledger_balances(evidence: Evidence) -> bool:
    """Whether every delta in the log has a final fate, and each learner counted as many deltas as the log has of it.

    A killed learner may have counted fewer: the last acknowledgements were lost with its process.
    """
    deltas = evidence.history.deltas
    if any(delta.fate is Fate.PENDING for delta in deltas):
        return False
    for learner_id, follower in evidence.learners.items():
        in_log = sum(delta.item.learner == learner_id for delta in deltas)
        counted = sum(line.deltas_acknowledged for line in follower.final_of_attempts())
        was_killed = learner_id == evidence.plan.killed_learner_id
        if counted > in_log or (counted < in_log and not was_killed):
            return False
    return True


def _steps_without_syncer(evidence: Evidence) -> int:
    killed, back = evidence.timeline.unix_s("syncer_killed"), evidence.timeline.unix_s("syncer_back")
    lines = [line for follower in evidence.learners.values() for line in follower.lines if killed < line.unix_s < back]
    return len({(line.learner, line.attempt, line.step) for line in lines})


def _checks(summary: Summary) -> list[Check]:
    unheard, pending = summary.deltas_accepted_unheard, summary.deltas_pending
    outage_s = summary.syncer_back_at_s - summary.syncer_killed_at_s
    return [
        Check(
            "learning together helps",
            summary.merged_loss < summary.single_loss,
            f"held-out loss {summary.merged_loss:.3f} of the merged model, {summary.single_loss:.3f} of a single "
            "learner with the same number of tokens as one of the three",
        ),
        Check(
            "every version replays",
            summary.verify_ok,
            f"skerry verify recomputed {summary.versions_committed} versions from their deltas",
        ),
        Check(
            "every acknowledged delta has its fate",
            summary.ledger_balances,
            f"{summary.deltas_acknowledged} acknowledged"
            + (f" + {unheard} whose acknowledgement the killed learner did not receive" if unheard else "")
            + f" = {summary.deltas_merged} merged + {summary.deltas_named_unmerged} superseded, expired or quarantined"
            + (f" + {pending} pending" if pending else ""),
        ),
        Check(
            "about four bits up",
            0 < summary.bits_per_parameter_up <= MAX_BITS_UP,
            f"{summary.bits_per_parameter_up:.2f} bits per parameter of a delta; limit {MAX_BITS_UP:.0f}",
            is_required=False,
        ),
        Check(
            "about four bits down",
            0 < summary.bits_per_parameter_down <= MAX_BITS_DOWN,
            f"{summary.bits_per_parameter_down:.2f} bits per parameter of a new version; limit {MAX_BITS_DOWN:.0f}",
            is_required=False,
        ),
        Check(
            "training steps are not delayed",
            summary.max_step_stall_ms <= MAX_STALL_MS,
            f"longest pause {summary.max_step_stall_ms:.1f} ms, of which {summary.max_step_stall_cpu_ms:.1f} ms "
            f"computing and {summary.max_step_stall_queued_ms:.1f} ms waiting for one of the {summary.core_count} "
            f"cores; limit {MAX_STALL_MS:.0f} ms",
            is_required=False,
        ),
        Check(
            "training goes on without the syncer",
            summary.steps_without_syncer > 0,
            f"{summary.steps_without_syncer} inner steps in {outage_s:.1f} s",
            is_required=False,
        ),
    ]
