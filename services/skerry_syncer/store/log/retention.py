"""Which versions of a run stay: what its policy asks for, as the versions, positions and objects that this takes.

    whole      of each fragment the newest versions, with outer state and deltas
    weights    of versions that were the newest within some hours, of the last version of each 24 hours, and of pins

Time is the run's age (`RunLog.age_s`), which no calendar clock enters, and ends with the run's newest version. So a run
that has stopped loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from skerry.wire.policy import Policy
from skerry_syncer.store.log.entries import Fate, ObjectRef
from skerry_syncer.store.log.state import FragmentState, RunState, VersionState

_DAY_S: Final = 86_400.0


@dataclass(frozen=True)
class Retention:
    """What a collection keeps. It always keeps the newest versions, pending deltas and what is pinned."""

    version_count: int = 8  # the newest versions of each fragment that stay whole: weights, outer state, deltas
    hours: float = 0.0  # and the weights of those that were the newest within this time
    day_count: int = 0  # and of the last of each 24 hours, so many
    litter_age_s: float = _DAY_S  # younger objects may belong to an entry that is still to be written
    keeps_quarantined: bool = True  # quarantined deltas, which a person may want to inspect

    @classmethod
    def of(cls, policy: Policy) -> Retention:
        """Returns what a run's policy asks for."""
        return cls(policy.kept_version_count, policy.kept_hours, policy.kept_day_count)


def kept_positions(state: RunState, retention: Retention) -> tuple[int, list[int]]:
    """Returns the position since which the weights of every version stay, and those before it at which they stay.

    Pins are not among them. That a day's other versions are forgotten changes neither.
    """
    known = [version for fragment in state.fragments.values() for version in fragment.known().values()]
    known.sort(key=lambda version: -version.position)
    newest_s, end = (known[0].made_at_age_s, known[0].position) if known else (0.0, 0)
    made = [version.position for version in known if newest_s - version.made_at_age_s < retention.hours * 3600]
    since = min(made, default=end + 1) - 1  # the version before that was the newest within the time too
    days: dict[float, int] = {}
    for version in known:
        days.setdefault(version.made_at_age_s // _DAY_S, version.position)
    return since, sorted(sorted((at for at in days.values() if at < since), reverse=True)[: retention.day_count])


def weights_kept(
    state: RunState, fragment: FragmentState, since: int, positions: Iterable[int] = ()
) -> dict[int, VersionState]:
    """Returns by number the versions that keeping weights takes: those since a position, at some, and at every pin."""
    known = fragment.known()
    at = (fragment.at(position) for position in (*positions, *state.policy.pinned_positions))
    wanted = {number for number, version in known.items() if version.until == 0 or version.until > since}
    found: dict[int, VersionState] = {}
    for number in sorted(wanted | {version.version for version in at if version is not None}, reverse=True):
        if number not in found:
            found |= {version.version: version for version in _weights_chain(state, known, known[number])}
    return found


def _weights_chain(state: RunState, known: Mapping[int, VersionState], newest: VersionState) -> list[VersionState]:
    """Returns the versions that lead to the weights of `newest`, down to a snapshot; none if they were collected."""
    found = [newest]
    while not (weights := found[-1].weights) or _are_gone(state, weights):
        update = () if found[-1].commit is None else found[-1].commit.commit.update
        before = known.get(found[-1].version - 1)
        if not update or before is None or _are_gone(state, update):
            return []
        found.append(before)
    return found


def _are_gone(state: RunState, refs: Iterable[ObjectRef]) -> bool:
    return not state.condemned.isdisjoint(ref.name for ref in refs)


def has_weights_at(state: RunState, position: int) -> bool:
    """Whether the weights that every fragment had at a log position can still be made."""
    return 0 < position <= state.position and all(
        (version := fragment.at(position)) is not None and _weights_chain(state, fragment.known(), version)
        for fragment in state.fragments.values()
    )


def pinned_names(state: RunState) -> set[str]:
    """Returns the names of the objects that no collection may take because of pins."""
    return {
        ref.name
        for fragment in state.fragments.values()
        if state.policy.pinned_positions
        for version in weights_kept(state, fragment, state.position).values()
        for ref in version.weights_refs
    }


def kept_names(state: RunState, retention: Retention) -> set[str]:
    """Returns the names of the objects that stay."""
    names = state.referenced_names()
    since, positions = kept_positions(state, retention)
    for fragment in state.fragments.values():
        for number in range(fragment.version, max(-1, fragment.version - retention.version_count), -1):
            for version in state.chain(fragment, number, 0):
                names.update(ref.name for ref in _version_refs(state, version))
        for version in weights_kept(state, fragment, since, positions).values():
            names.update(ref.name for ref in version.weights_refs)
    if retention.keeps_quarantined:
        for delta in state.deltas.values():
            if delta.fate is Fate.QUARANTINED:
                names.update(part.name for part in delta.item.parts)
    return names


def named_refs(state: RunState) -> Iterator[ObjectRef]:
    """Yields every object that an admitted entry named, as far as that is not forgotten."""
    for delta in state.deltas.values():
        yield from delta.item.parts
    for fragment in state.fragments.values():
        for version in fragment.versions.values():
            yield from _version_refs(state, version)


def size_bytes(state: RunState) -> int:
    """Returns how much the run has in the store, but for its log and for what no entry names."""
    return sum({ref.name: ref.size_bytes for ref in named_refs(state) if ref.name not in state.condemned}.values())


def is_due(state: RunState) -> bool:
    """Whether the objects that a collection would delete take at least a quarter of the bytes that it would keep.

    The threshold makes collections rare, and lets a run use a quarter more disk than its policy keeps. Summing takes
    microseconds for each delta, so it is skipped for a run that still keeps all its versions.
    """
    if all(len(fragment.versions) <= state.policy.kept_version_count for fragment in state.fragments.values()):
        return False
    sizes = {ref.name: ref.size_bytes for ref in named_refs(state) if ref.name not in state.condemned}
    kept = kept_names(state, Retention.of(state.policy))
    kept_bytes = sum(size for name, size in sizes.items() if name in kept)
    return 4 * (sum(sizes.values()) - kept_bytes) > kept_bytes


def _version_refs(state: RunState, version: VersionState) -> Iterator[ObjectRef]:
    """Yields every object of one version: its snapshot, its update, and the deltas that went into it."""
    yield from version.weights
    yield from version.outer
    yield from state.round_refs(version)
