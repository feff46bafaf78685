"""What a large run needs, computed from measured rows: its bytes, its link's share, processors and memory.

For N parameters, M learners, P fragments, H steps of t seconds, an island of Z machines, and from the rows

    u, d   bits a parameter up and down            a, s   CPU of learner and syncer, ns a parameter sent and merged
    m      peak memory of a learner beyond training, and f of a syncer beyond a fragment, in their float32 sizes

a learner moves N parameters both ways in H t seconds:

    link = N (u + d) / (H t)                       (1)  bits a second of each learner
    synchronisation = N (u + d) / W                (2)  seconds on a link of W bits a second, all fragments in a row
    learner cores = a N / (H t)                    (3)  of all the machines of its island together
    syncer cores = s M N / (H t)                   (4)  spread over as many replicas as it takes
    learner memory = m 4 N / Z, syncer memory = f 4 N / P   (5)

(1) is below the link's speed where training hides the exchange. All of it grows with N; (1) to (3) do not depend on M,
and P sets only how large the pieces are: their number costs as much as a push of nothing costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from benchmarks.report import Row


@dataclass(frozen=True)
class Job:
    """A run that was not measured."""

    name: str
    numel: float
    learners: int
    fragments: int
    inner_step_count: int
    step_s: float
    machines: int  # an island's
    link_bits_per_s: float

    @property
    def round_s(self) -> float:
        """Seconds in which each fragment moves once."""
        return self.inner_step_count * self.step_s


@dataclass(frozen=True)
class Costs:
    """What was measured; the symbols are those of the module's docstring."""

    bits: float  # u + d
    learner_ns: float  # a
    syncer_ns: float  # s
    learner_memory: float  # m
    syncer_memory: float  # f

    @classmethod
    def of(cls, tables: Mapping[str, list[Row]]) -> Costs:
        """Reads them from the rows of the tables.

        Raises:
            LookupError: a row is missing, because its table was not measured.
        """
        return cls(
            bits=_value(tables, "bits", "both ways together"),
            learner_ns=_value(tables, "synchronisation", "CPU of a learner, a parameter"),
            syncer_ns=_value(tables, "synchronisation", "CPU of the syncer, a contributed parameter"),
            learner_memory=_value(tables, "trainer", "peak memory beyond training / float32 size"),
            syncer_memory=_largest_fragment(tables),
        )


def _largest_fragment(tables: Mapping[str, list[Row]]) -> float:
    """Returns the ratio of the largest fragment whose memory was measured: small ones show what a process takes."""
    found = [row.ratio for row in tables.get("memory", []) if row.ratio is not None]
    if not found:
        raise LookupError("was not measured. table=memory")
    return found[-1]


def _value(tables: Mapping[str, list[Row]], table: str, metric: str) -> float:
    """Returns the first row's value: of synchronisations, that with int4.

    Raises:
        LookupError: there is none.
    """
    found = [row.value for row in tables.get(table, []) if row.metric == metric]
    if not found:
        raise LookupError(f"was not measured. table={table}, metric={metric}")
    return found[0]


JOBS: Final = (
    Job("12B, four regions, 2 Gbit/s", 12e9, 4, 24, 24, 4.0, 16, 2e9),
    Job("12B, four regions, 2 Gbit/s, H = 100", 12e9, 4, 24, 100, 4.0, 16, 2e9),
    Job("1T, eight regions, 100 Gbit/s", 1e12, 8, 96, 100, 20.0, 512, 100e9),
)


def rows_for(job: Job, costs: Costs) -> Iterator[Row]:
    """Yields what the job needs, equations (1) to (5)."""
    n, m = job.numel, job.learners
    bits = n * costs.bits
    case = f"{job.name}: M = {m}, P = {job.fragments}, H = {job.inner_step_count}, {job.step_s:g} s a step"
    link = bits / job.round_s
    needs = link / job.link_bits_per_s
    yield Row(case, "a learner's link, on average / link", link / 1e9, "Gbit/s", job.link_bits_per_s / 1e9, needs)
    whole_s = bits / job.link_bits_per_s
    yield Row(case, "all fragments in a row over the link / round", whole_s, "s", job.round_s, whole_s / job.round_s)
    yield Row(case, "a learner's bytes a round, both ways", bits / 8e9, "GB")
    yield Row(case, "cores of an island for the exchange", costs.learner_ns * n / 1e9 / job.round_s, "cores")
    yield Row(case, "cores of all syncers together", costs.syncer_ns * m * n / 1e9 / job.round_s, "cores")
    yield Row(case, "memory of a machine beyond training", costs.learner_memory * 4 * n / job.machines / 1e9, "GB")
    yield Row(case, "memory of a syncer for one fragment", costs.syncer_memory * 4 * n / job.fragments / 1e9, "GB")


def rows(tables: Mapping[str, list[Row]]) -> Iterator[Row]:
    """The jobs of the page; none while a table that they follow from was not measured."""
    try:
        costs = Costs.of(tables)
    except LookupError:
        return
    for job in JOBS:
        yield from rows_for(job, costs)
