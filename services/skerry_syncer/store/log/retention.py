"""What stays of a run: in the store, where collections take the rest, and in memory, where the fold forgets the rest.

    whole      of each fragment the newest versions, with outer state and deltas
    weights    of versions that were the newest within some hours, of the last version of each 24 hours, and of pins

Time is the run's age (`RunLog.age_s`), which no calendar clock enters, and ends with the run's newest version. So a run
that has stopped loses nothing.

A checkpoint item names, for each fragment, the oldest version to remember. The fold goes lower where a delta without a
fate was made from an older one, and down to the snapshot that rebuilding begins with. Of older versions only what it
takes to read their weights is remembered, where the item or a pin keeps them. A late repeat of what is forgotten has no
second effect: whatever its id, it belongs to a version that is forgotten. A learner's last delta of each fragment is
never forgotten, so that its fate can be asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from msgspec import structs

from skerry.wire.policy import Policy
from skerry_syncer.store.log.entries import CheckpointItem, Fate, ObjectRef
from skerry_syncer.store.log.state import CommitRecord, FragmentState, RunState, VersionState

_DAY_S: Final = 86_400.0
# Of each fragment, versions that are remembered at least.
LEAST_VERSIONS: Final = 8
# A learner that is restarted every hour is remembered for days. An older session would have to return after all these.
REMEMBERED_SESSIONS: Final = 64
# Requests are repeated for minutes.
REMEMBERED_REQUESTS: Final = 1024


def kept_positions(state: RunState, policy: Policy) -> tuple[int, list[int]]:
    """Returns the position since which the weights of every version stay, and those before it at which they stay.

    Pins are not among them. That a day's other versions are forgotten changes neither.
    """
    known = [version for fragment in state.fragments.values() for version in fragment.versions.values()]
    known.sort(key=lambda version: -version.position)
    newest_s, end = (known[0].made_at_age_s, known[0].position) if known else (0.0, 0)
    made = [version.position for version in known if newest_s - version.made_at_age_s < policy.kept_hours * 3600]
    since = min(made, default=end + 1) - 1  # the version before that was the newest within the time too
    days: dict[float, int] = {}
    for version in known:
        days.setdefault(version.made_at_age_s // _DAY_S, version.position)
    older = sorted(position for position in days.values() if position < since)
    return since, older[max(0, len(older) - policy.kept_day_count) :]


def weights_kept(
    state: RunState, fragment: FragmentState, since: int, positions: Iterable[int] = ()
) -> dict[int, VersionState]:
    """Returns by number the versions that keeping weights takes: those since a position, at some, and at every pin."""
    wanted = [version for version in fragment.versions.values() if version.until == 0 or version.until > since]
    wanted += filter(None, map(fragment.at, (*positions, *state.policy.pinned_positions)))
    return {each.version: each for version in wanted for each in _weights_chain(state, fragment, version)}


def _weights_chain(state: RunState, fragment: FragmentState, newest: VersionState) -> list[VersionState]:
    """Returns the versions that lead to the weights of `newest`, down to a snapshot; none if they were collected."""
    chain = [newest]
    while not (weights := chain[-1].weights) or state.are_condemned(weights):
        update = () if chain[-1].commit is None else chain[-1].commit.commit.update
        before = fragment.versions.get(chain[-1].version - 1)
        if not update or before is None or state.are_condemned(update):
            return []
        chain.append(before)
    return chain


def has_weights_at(state: RunState, position: int) -> bool:
    """Whether the weights that every fragment had at a log position can still be made."""
    return 0 < position <= state.position and all(
        (version := fragment.at(position)) is not None and _weights_chain(state, fragment, version)
        for fragment in state.fragments.values()
    )


def pinned_names(state: RunState) -> set[str]:
    """Returns the names of the objects that no collection may take because of pins."""
    return _weights_names(state, state.position) if state.policy.pinned_positions else set()


def kept_names(state: RunState, policy: Policy) -> set[str]:
    """Returns the names of the objects that stay; quarantined deltas among them, for a person to inspect."""
    names = state.referenced_names() | _weights_names(state, *kept_positions(state, policy))
    for fragment in state.fragments.values():
        newest = range(fragment.version, max(-1, fragment.version - policy.kept_version_count), -1)
        whole = {version.version: version for number in newest for version in state.chain(fragment, number)}
        for version in whole.values():
            names.update(ref.name for ref in _version_refs(state, version))
    for delta in state.deltas.values():
        if delta.fate is Fate.QUARANTINED:
            names.update(part.name for part in delta.item.parts)
    return names


def _weights_names(state: RunState, since: int, positions: Iterable[int] = ()) -> set[str]:
    return {
        ref.name
        for fragment in state.fragments.values()
        for version in weights_kept(state, fragment, since, positions).values()
        for ref in version.weights_refs
    }


def named_refs(state: RunState) -> Iterator[ObjectRef]:
    """Yields every object that an admitted entry named, as far as that is not forgotten."""
    for delta in state.deltas.values():
        yield from delta.item.parts
    for fragment in state.fragments.values():
        for version in fragment.versions.values():
            yield from _version_refs(state, version)


def _version_refs(state: RunState, version: VersionState) -> Iterator[ObjectRef]:
    """Yields every object of one version: its snapshot, its update, and the deltas that went into it."""
    yield from version.weights
    yield from version.outer
    yield from state.round_refs(version)


def is_due(state: RunState) -> bool:
    """Whether the objects that a collection would delete take at least a quarter of the bytes that it would keep.

    The threshold makes collections rare, and lets a run use a quarter more disk than its policy keeps. Summing takes
    microseconds for each delta, so it is skipped for a run that still keeps all its versions.
    """
    if all(len(fragment.versions) <= state.policy.kept_version_count for fragment in state.fragments.values()):
        return False
    sizes = {ref.name: ref.size_bytes for ref in named_refs(state) if ref.name not in state.condemned}
    kept = sum(sizes.get(name, 0) for name in kept_names(state, state.policy))
    return 4 * (sum(sizes.values()) - kept) > kept


def oldest_versions(state: RunState) -> dict[str, int]:
    """Returns the versions that a checkpoint names now: older ones are no base for a push any more."""
    oldest, policy = {}, state.policy
    for name, fragment in state.fragments.items():
        version = max(fragment.oldest, fragment.version - max(LEAST_VERSIONS, policy.kept_version_count))
        while version > fragment.oldest and (
            fragment.rounds_behind(version, policy.inner_step_count) <= policy.max_staleness  # it is a base
        ):
            version -= 1
        oldest[name] = version
    return oldest


def forget(state: RunState, item: CheckpointItem) -> None:
    """Moves the horizon to the item's versions at most, and drops from memory what is behind it."""
    since = state.position if item.kept_since is None else item.kept_since
    for name, version in item.oldest.items():
        fragment = state.fragments[name]
        kept = weights_kept(state, fragment, since, item.kept)
        fragment.oldest = max(fragment.oldest, _lowest_needed(state, fragment, version))
        newer = {number: each for number, each in fragment.versions.items() if number >= fragment.oldest}
        older = {number: _without_deltas(kept[number]) for number in sorted(kept) if number < fragment.oldest}
        fragment.versions = older | newer
    for learner in state.learners.values():
        del learner.sessions[:-REMEMBERED_SESSIONS]
    newest = sorted(state.requests.items(), key=lambda request: (request[1], request[0]))[-REMEMBERED_REQUESTS:]
    state.requests = dict(newest)
    _drop_deltas(state)
    _drop_condemned(state)


def _lowest_needed(state: RunState, fragment: FragmentState, version: int) -> int:
    """Returns `version`, or an older one that rebuilding it or merging a delta without a fate takes."""
    frozen = () if fragment.closing is None else fragment.closing.members
    undecided = [*fragment.pending, *(member.delta for member in frozen)]
    newest = min([version, fragment.version, *(state.deltas[name].item.base_version for name in undecided)])
    return min((each.version for each in state.chain(fragment, newest)), default=fragment.oldest)


def _without_deltas(version: VersionState) -> VersionState:
    """Returns a version of which only the weights are remembered."""
    if version.commit is None:
        return version
    close = structs.replace(version.commit.close, members=(), decided=())
    return replace(version, commit=CommitRecord(close, version.commit.commit))


def _drop_deltas(state: RunState) -> None:
    """Drops the deltas that have their fate and came from, and went into, versions that are forgotten."""
    for name, delta in list(state.deltas.items()):
        oldest = state.fragments[delta.item.fragment].oldest
        newest = max(delta.item.base_version, delta.version if delta.fate is Fate.MERGED else 0)
        if delta.fate is Fate.PENDING or newest >= oldest:
            continue
        learner = state.learners.get(delta.item.learner)
        if learner is not None and learner.last_deltas.get(delta.item.fragment) == name:
            # The learner may not know the fate of its last one yet.
            state.deltas[name] = replace(delta, item=structs.replace(delta.item, parts=(), squared_norms=()))
        else:
            del state.deltas[name]
    for key in [key for key in state.bases if key[2] < state.fragments[key[1]].oldest]:
        del state.bases[key]


def _drop_condemned(state: RunState) -> None:
    """Drops what was condemned before its fragment's oldest version: items that could name it are refused as too old.

    Objects of known versions stay condemned, so that nobody looks for them.
    """
    fragments = state.fragments
    horizons = {name: each.versions[each.oldest].position for name, each in fragments.items() if each.oldest > 0}
    known = {
        ref.name
        for fragment in fragments.values()
        for version in fragment.versions.values()
        for ref in (*version.weights_refs, *version.outer)
    }
    for name, position in list(state.condemned_at.items()):
        fragment_name = name.partition("/")[2].partition("/")[0]
        if position < horizons.get(fragment_name, 0) and name not in known:
            del state.condemned_at[name]
