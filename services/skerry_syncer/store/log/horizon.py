"""What the fold forgets, so that the state of a run is bounded by what it retains and not by its age.

A checkpoint item names, for each fragment, the oldest version to remember. The fold lowers it where something older is
still needed: the base of a delta without a fate, and the snapshot that rebuilding starts from. Behind that horizon are

    versions         below the oldest one
    deltas           with their fate, whose base and whose version, if they were merged, are below it
    condemned names  of the fragment that were condemned before the oldest version was made
    sessions         of a learner, but for the newest `REMEMBERED_SESSIONS`
    request ids      but for the newest `REMEMBERED_REQUESTS`

Of older versions that the item or a pin keeps, only what it takes to read their weights is remembered.

A late repeat still has no second effect. A forgotten delta is refused because its base is forgotten, whatever its id.
So is a delta, update or snapshot whose object was condemned and forgotten, because it belongs to a version that is.
A learner's last delta of each fragment is never forgotten, so that its fate can be asked for.
"""

from __future__ import annotations

from typing import Final

from msgspec import structs

from skerry_syncer.store.log.entries import CheckpointItem, MergeScalars
from skerry_syncer.store.log.retention import weights_kept
from skerry_syncer.store.log.state import CommitRecord, FragmentState, RunState, VersionState

# A learner that is restarted every hour is remembered for days. An older session would have to return after all these.
REMEMBERED_SESSIONS: Final = 64
# Requests are repeated for minutes.
REMEMBERED_REQUESTS: Final = 1024
_NO_SCALARS: Final = MergeScalars("", "", (), (), "", "")
# Versions of each fragment that are remembered at least: what a collection keeps whole by default.
LEAST_VERSIONS: Final = 8


def forget(state: RunState, item: CheckpointItem) -> None:
    """Moves the horizon to the item's versions at most, and drops from memory what is behind it."""
    since = state.position if item.kept_since is None else item.kept_since
    for name, version in item.oldest.items():
        fragment = state.fragments[name]
        kept = weights_kept(state, fragment, since, item.kept)
        fragment.oldest = max(fragment.oldest, _lowest_needed(state, fragment, version))
        fragment.kept = frozenset(number for number in kept if number < fragment.oldest)
    for learner in state.learners.values():
        del learner.sessions[:-REMEMBERED_SESSIONS]
    newest = sorted(state.requests.items(), key=lambda request: (request[1], request[0]))[-REMEMBERED_REQUESTS:]
    state.requests = dict(newest)
    if state.forgets:
        _drop(state)


def oldest_versions(state: RunState) -> dict[str, int]:
    """Returns the versions that a checkpoint names now: older ones are no base for a push any more."""
    oldest = {}
    for name, fragment in state.fragments.items():
        least = max(LEAST_VERSIONS, state.policy.kept_version_count)
        version = max(fragment.oldest, fragment.version - least)
        while version > fragment.oldest and _is_base(state, fragment, version):
            version -= 1
        oldest[name] = version
    return oldest


def _is_base(state: RunState, fragment: FragmentState, version: int) -> bool:
    return fragment.rounds_behind(version, state.policy.inner_step_count) <= state.policy.max_staleness


def _lowest_needed(state: RunState, fragment: FragmentState, version: int) -> int:
    """Returns `version`, or an older one that rebuilding it or merging a delta without a fate takes."""
    frozen = () if fragment.closing is None else fragment.closing.members
    unmerged = [*fragment.pending.values(), *(state.deltas[member.delta] for member in frozen)]
    at = min([version, fragment.version, *(delta.item.base_version for delta in unmerged)])
    return min((one.version for one in state.chain(fragment, at, fragment.oldest)), default=fragment.oldest)


def _drop(state: RunState) -> None:
    names: set[str] = set()
    for fragment in state.fragments.values():
        fragment.versions = fragment.known()
        for number in fragment.kept:
            fragment.versions[number].commit = _without_round(fragment.versions[number])
            names.update(
                ref.name for ref in (*fragment.versions[number].weights_refs, *fragment.versions[number].outer)
            )
    for name, delta in list(state.deltas.items()):
        if state.is_forgotten(delta):
            del state.deltas[name]
        elif state.is_behind(delta):
            delta.item = structs.replace(delta.item, parts=(), squared_norms=())
    for key in [key for key in state.bases if key[2] < state.fragments[key[1]].oldest]:
        del state.bases[key]
    for name in [name for name, at in state.condemned_at.items() if at < state.horizon(name) and name not in names]:
        del state.condemned_at[name]


def _without_round(version: VersionState) -> CommitRecord | None:
    """Returns a version's record with its update alone."""
    if version.commit is None:
        return None
    close = structs.replace(version.commit.close, members=(), decided=())
    return CommitRecord(close, structs.replace(version.commit.commit, scalars=_NO_SCALARS))
