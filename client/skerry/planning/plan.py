"""The plan of a run: what a setting of H, P and codec needs of each learner, of the syncers and of the store.

`docs/planning.md` has the formulas, each with its source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Final

from skerry.planning.figures import Figures
from skerry.planning.formulas import fragment_bits_per_s, mean_bits_per_s
from skerry.wire.codecs import Codec
from skerry.wire.policy import Policy

HOURS: Final = 730  # of a month
_MONTH_S: Final = 3600 * HOURS
_FLOAT32_BYTES: Final = 4
_SNAPSHOT_BYTES: Final = 3 * _FLOAT32_BYTES  # weights, momentum and residual
_DELTA_PUTS: Final = 2  # of a learner's delta: a part and an entry of the log
PART_BYTES: Final = 4 * 2**20  # of a delta, as syncers suggest it


@dataclass(frozen=True)
class Site:
    """A learner, or the syncers: what is known of it. `bandwidth_bits_per_s` is that of each way."""

    name: str
    step_s: float = 0.0
    bandwidth_bits_per_s: float | None = None
    price: float | None = None  # of an hour
    memory_bytes: float | None = None  # of a process: of each rank, or of a syncer
    rank_count: float = 1


@dataclass(frozen=True)
class Prices:
    """What is paid for traffic and storage; None is not known."""

    egress: float | None = None  # of a GB
    stored: float | None = None  # of a GB for a month
    puts: float | None = None  # of a million requests
    gets: float | None = None


@dataclass(frozen=True)
class Setting:
    """What is chosen."""

    inner_step_count: int
    fragment_count: int
    codec: Codec

    def __str__(self) -> str:
        """The setting as people write it."""
        return f"H={self.inner_step_count} P={self.fragment_count} {self.codec}"


@dataclass(frozen=True)
class LearnerPlan:
    """What a learner needs, of its own and of its link, which carries as much each way but for the encodings."""

    name: str
    up_bits_per_step: float
    down_bits_per_step: float
    bits_per_s: float  # mean of the busier way
    paper_bits_per_s: float  # of one fragment of H that takes 2 steps, as the paper states it
    bandwidth_bits_per_s: float | None
    training_share: float  # of the time, which `step()` leaves
    utilisation: float
    answer_s: float
    memory_bytes: float
    rank_memory_bytes: float
    core_count: float
    egress_bytes_per_month: float
    cost_per_month: float | None

    def utilisation_at(self, bits_per_s: float) -> float:
        """Returns the share of the time that goes into steps which reach the run in time, on such a link."""
        return self.training_share * min(1.0, bits_per_s / self.bits_per_s)


@dataclass(frozen=True)
class Plan:
    """What a setting needs; a month has 730 hours."""

    setting: Setting
    learners: tuple[LearnerPlan, ...]
    version_interval_s: float  # of each fragment
    version_s: float  # from a delta to the new version at the learner that has it last
    syncer_memory_bytes: float
    syncer_core_count: float
    syncer_bits_per_s: float
    written_bytes_per_month: float
    stored_bytes: float  # after a month
    puts_per_month: float
    gets_per_month: float
    egress_bytes_per_month: float
    cost_per_month: float | None
    refusals: tuple[str, ...] = field(default=())


def plan(
    parameters: float,
    sites: Sequence[Site],
    setting: Setting,
    figures: Figures,
    *,
    bits: tuple[float, float] | None = None,
    syncer: Site,
    prices: Prices,
    policy: Policy,
) -> Plan:
    """Returns what a setting needs of learners, syncers and store, and what of it they do not have.

    `bits` are of a parameter, up and down, if they were measured; else they are those of the figures.
    """
    N, P = parameters, setting.fragment_count
    up, down = bits or (figures.bits, figures.bits)
    # The fastest learner opens the rounds, and the others send what they have then.
    interval_s = setting.inner_step_count * min(site.step_s for site in sites)
    rounds = _MONTH_S / interval_s
    merge_s = figures.syncer_cpu_s * len(sites) * N / P  # on one core
    arrival_s = max(_transfer_s(site, up * N / P) + site.step_s for site in sites)
    merged_s = arrival_s + merge_s + figures.learner_cpu_s * N / P
    learners = tuple(
        _learner_plan(site, N, setting, figures, up, down, interval_s=interval_s, merged_s=merged_s, prices=prices)
        for site in sites
    )
    merges = ceil(P * merge_s / interval_s)  # at work at a time
    memory_bytes = merges * figures.syncer_memory_bytes(_FLOAT32_BYTES * N / P, len(sites))
    traffic = sum(learner.bits_per_s for learner in learners)
    refusals = _lacks(syncer, traffic, memory_bytes)
    for site, learner in zip(sites, learners, strict=True):
        refusals += _lacks(site, learner.bits_per_s, learner.rank_memory_bytes)
        if learner.answer_s > interval_s:  # it gains nothing over training alone (docs/learning.md)
            refusals.append(f"{site.name}: a version takes {learner.answer_s:.3g} s, H steps take {interval_s:.3g} s")
    deltas_bytes, update_bytes = len(sites) * up * N / 8, down * N / 8
    log_bytes = P * figures.log_bytes * (len(sites) + 1) / 2  # a delta's entry has about as much as a version's
    written_bytes, stored_bytes = _store_bytes(N, rounds, log_bytes, deltas_bytes, update_bytes, policy)
    pieces = len(sites) * (ceil(setting.codec.bits * N / P / 8 / PART_BYTES) - 1)
    puts = rounds * P * (figures.put_count + _DELTA_PUTS * (len(sites) - 1) + pieces)
    gets = rounds * P * (figures.get_count + pieces)
    sent_bytes = rounds * len(sites) * update_bytes
    cost = _cost(
        (syncer.price, HOURS),
        (prices.egress, sent_bytes / 1e9),
        (prices.stored, stored_bytes / 1e9),
        (prices.puts, puts / 1e6),
        (prices.gets, gets / 1e6),
        *((learner.cost_per_month, 1) for learner in learners),
    )
    return Plan(
        setting,
        learners,
        version_interval_s=interval_s,
        version_s=max(learner.answer_s for learner in learners),
        syncer_memory_bytes=memory_bytes,
        syncer_core_count=figures.syncer_cpu_s * len(sites) * N / interval_s,
        syncer_bits_per_s=traffic,
        written_bytes_per_month=written_bytes,
        stored_bytes=stored_bytes,
        puts_per_month=puts,
        gets_per_month=gets,
        egress_bytes_per_month=sent_bytes + sum(learner.egress_bytes_per_month for learner in learners),
        cost_per_month=cost,
        refusals=tuple(refusals),
    )


def _learner_plan(  # noqa: PLR0917 - the formulas' symbols
    site: Site,
    N: float,
    setting: Setting,
    figures: Figures,
    up: float,
    down: float,
    *,
    interval_s: float,
    merged_s: float,
    prices: Prices,
) -> LearnerPlan:
    C, P, bits = site.step_s, setting.fragment_count, max(up, down)
    needed = mean_bits_per_s(bits, N, interval_s, 1)
    share = C / (C + figures.step_s * N * C / interval_s / site.rank_count)
    memory_bytes = figures.learner_memory * _FLOAT32_BYTES * N
    egress_bytes = _MONTH_S / interval_s * up * N / 8
    return LearnerPlan(
        site.name,
        up_bits_per_step=up * N * C / interval_s,
        down_bits_per_step=down * N * C / interval_s,
        bits_per_s=needed,
        paper_bits_per_s=fragment_bits_per_s(bits, N, C, setting.inner_step_count),
        bandwidth_bits_per_s=site.bandwidth_bits_per_s,
        training_share=share,
        utilisation=share * min(1.0, (site.bandwidth_bits_per_s or needed) / needed),
        answer_s=merged_s + _transfer_s(site, down * N / P),
        memory_bytes=memory_bytes,
        rank_memory_bytes=memory_bytes * ceil(P / site.rank_count) / P,
        core_count=figures.learner_cpu_s * N / interval_s,
        egress_bytes_per_month=egress_bytes,
        cost_per_month=_cost((site.price, HOURS), (prices.egress, egress_bytes / 1e9)),
    )


def _transfer_s(site: Site, bits: float) -> float:
    return bits / site.bandwidth_bits_per_s if site.bandwidth_bits_per_s else 0.0


def _lacks(site: Site, bits_per_s: float, memory_bytes: float) -> list[str]:
    lacks = []
    if site.bandwidth_bits_per_s is not None and bits_per_s > site.bandwidth_bits_per_s:
        lacks.append(f"{site.name}: {bits_per_s / 1e9:.3g} Gbit/s needed, {site.bandwidth_bits_per_s / 1e9:.3g} given")
    if site.memory_bytes is not None and memory_bytes > site.memory_bytes:
        lacks.append(f"{site.name}: a process needs {memory_bytes / 1e9:.3g} GB, {site.memory_bytes / 1e9:.3g} given")
    return lacks


def _cost(*items: tuple[float | None, float]) -> float | None:
    """Returns the sum of prices times amounts, without those of unknown price; None if none is known."""
    known = [price * amount for price, amount in items if price is not None]
    return sum(known) if known else None


def _store_bytes(  # noqa: PLR0917 - what a month's rounds are made of
    N: float, rounds: float, log_bytes: float, delta_bytes: float, update_bytes: float, policy: Policy
) -> tuple[float, float]:
    """Returns the bytes that a month's rounds write, and those that the policy keeps of them.

    A round writes so many bytes of the log, of all learners' deltas, and of updates.
    """
    # Rounds between two snapshots.
    snapshot_rounds = max(1, ceil(policy.snapshot_ratio * _FLOAT32_BYTES * N / update_bytes))
    round_bytes = delta_bytes + update_bytes + _SNAPSHOT_BYTES * N / snapshot_rounds
    weights_bytes = update_bytes + _FLOAT32_BYTES * N / snapshot_rounds
    day_bytes = _FLOAT32_BYTES * N + update_bytes * (snapshot_rounds - 1) / 2
    stored_bytes = (
        policy.kept_version_count * (delta_bytes + update_bytes)
        + max(1.0, policy.kept_version_count / snapshot_rounds) * _SNAPSHOT_BYTES * N
        + min(policy.kept_hours, HOURS) / HOURS * rounds * weights_bytes
        + min(policy.kept_day_count, HOURS / 24) * day_bytes
        + rounds * log_bytes
    )
    return rounds * (round_bytes + log_bytes), min(stored_bytes, rounds * (round_bytes + log_bytes))
