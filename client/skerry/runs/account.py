"""What learners and their organisations contributed to a run's weights, summed from the events of its log.

Only versions that the newest weights come from count, so what a roll-back abandoned does not, unless another one
brought it back. Tokens and steps are those of the merged deltas as their learners counted them, as the mean over
fragments; a share of the weight is the mean over versions. An organisation is the O in the subject of a learner's
certificate, which the authority that signed it vouches for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from skerry.v1.types_pb2 import Event


class Contribution(NamedTuple):
    """What a learner, or all learners of an organisation, contributed."""

    learner_ids: tuple[str, ...]  # one, or those of the organisation
    organisation: str  # empty: their certificates name none, or they had none
    token_count: float
    step_count: float
    weight_share: float  # 0 to 1
    version_count: int  # versions of all fragments with a delta of theirs


class Account(NamedTuple):
    """A run's contributions, the largest share of the weight first."""

    position: int  # of the log, up to which it was read
    version_count: int  # versions of all fragments that count
    learners: tuple[Contribution, ...]  # one with several organisations is in several
    organisations: tuple[Contribution, ...]


class _Delta(NamedTuple):
    learner_id: str
    organisation: str
    token_count: int
    step_count: int
    weight_share: float


class Accounting:
    """Sums up a run from its events, which must be all from position 1 on and in order."""

    def __init__(self) -> None:
        self._position = 0
        self._organisations: dict[str, str] = {}  # by learner, now
        # By fragment and version: the version that it was made from, and the deltas that were merged into that.
        self._made: defaultdict[str, dict[int, tuple[int, tuple[_Delta, ...]]]] = defaultdict(dict)

    def apply(self, event: Event) -> None:
        """Takes the next event."""
        self._position = event.position
        match event.WhichOneof("kind"):
            case "learner" if event.learner.is_live:
                self._organisations[event.learner.learner_id] = event.learner.organisation
            case "version_committed" if event.version_committed.version.version:  # initial weights are nobody's work
                made = event.version_committed
                deltas = tuple(
                    _Delta(
                        delta.learner_id,
                        self._organisations.get(delta.learner_id, ""),
                        delta.token_count,
                        delta.step_count,
                        delta.weight_share,
                    )
                    for delta in made.merged
                )
                self._made[made.version.fragment][made.version.version] = made.version.version - 1, deltas
            case "rolled_back":
                for version, source in zip(event.rolled_back.versions, event.rolled_back.source_versions, strict=True):
                    self._made[version.fragment][version.version] = source, ()

    def account(self, fragment_count: int) -> Account:
        """Returns the sums of a run with so many fragments, as of the last event."""
        rounds = [deltas for versions in self._made.values() for deltas in _rounds(versions)]

        def summed(key: Callable[[_Delta], tuple[str, ...]]) -> tuple[Contribution, ...]:
            theirs = defaultdict[tuple[str, ...], list[_Delta]](list)
            counts = defaultdict[tuple[str, ...], int](int)
            for deltas in rounds:
                for delta in deltas:
                    theirs[key(delta)].append(delta)
                for contributor in set(map(key, deltas)):
                    counts[contributor] += 1
            rows = [_contribution(own, counts[name], len(rounds), fragment_count) for name, own in theirs.items()]
            return tuple(sorted(rows, key=lambda row: (-row.weight_share, row.learner_ids, row.organisation)))

        return Account(
            self._position,
            len(rounds),
            summed(lambda delta: (delta.learner_id, delta.organisation)),
            summed(lambda delta: (delta.organisation,)),
        )


def _rounds(versions: dict[int, tuple[int, tuple[_Delta, ...]]]) -> Iterator[tuple[_Delta, ...]]:
    """Yields the deltas of each round that led to a fragment's newest version."""
    version = max(versions)
    while version in versions:
        version, deltas = versions[version]
        if deltas:
            yield deltas


def _contribution(deltas: Sequence[_Delta], version_count: int, round_count: int, fragment_count: int) -> Contribution:
    return Contribution(
        tuple(sorted({delta.learner_id for delta in deltas})),
        deltas[0].organisation,
        sum(delta.token_count for delta in deltas) / fragment_count,
        sum(delta.step_count for delta in deltas) / fragment_count,
        sum(delta.weight_share for delta in deltas) / round_count,
        version_count,
    )
