"""What becomes of a round with an unreadable delta, and of a fragment whose outer state cannot be rebuilt.

The round is closed again without the delta. The state is lost with a delta or a snapshot of the past, but the weights
are still known by the updates. The fragment gets its next version, with the same weights and without momentum and
residual, by the same item as a roll-back; so every replica begins anew from one state. Deltas that are pending or
frozen are recorded as expired.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from typing import Final

from skerry.runtime.logs import get_logger
from skerry.runtime.workers import Workers
from skerry_syncer.rounds.closing import closed_round
from skerry_syncer.rounds.membership import MembershipView
from skerry_syncer.store.log.entries import ClosedItem, Decided, Fate, RollbackFragment, RollbackItem, RunStatus
from skerry_syncer.store.log.run_log import RunLog
from skerry_syncer.store.log.state import FragmentState, RunState, VersionState
from skerry_syncer.store.versions.replay import DAMAGE, Replayer, snapshot_tensors
from skerry_syncer.store.versions.scratch import Scratch

_LOG: Final = get_logger(__name__)


async def restart(log: RunLog, name: str, workers: Workers, scratch: Scratch) -> None:
    """Gives the fragment called `name` its next version with the newest weights; in a closing run, voids its round.

    Does nothing if its state can be rebuilt by now.

    Raises:
        UnreadableObjectError: the weights are lost too; only a repair or a roll-back to an older version helps.
        StoreError: the store failed; nothing changed.
    """
    fragment = log.state.fragments[name]
    newest, closing = fragment.newest, fragment.closing
    with suppress(*DAMAGE):
        await Replayer(log, name, workers).rebuild(newest.version, scratch)
        return
    if log.state.status is not RunStatus.OPEN:
        if closing is not None:
            await log.append([_void(closing)])
        return
    again = await stored_again(log, fragment, newest, workers)
    # Replicas that do the same at once make the same request.
    request_id = hashlib.sha256(f"restart {name} {newest.version}".encode()).hexdigest()[:32]
    (outcome,) = await log.append([RollbackItem(request_id, log.state.position, (again,))])
    if outcome.rejection is None:
        _LOG.warning("fragment goes on without momentum", run=log.spec.name, fragment=name, version=again.version)


async def stored_again(
    log: RunLog, fragment: FragmentState, source: VersionState, workers: Workers
) -> RollbackFragment:
    """Stores the content of `source` under the fragment's next version number; holds one fragment in memory.

    Raises:
        ObjectMissingError: the content was collected.
        UnreadableObjectError: it is lost or damaged.
    """
    name = fragment.layout.name
    version = fragment.version + 1
    weights = await Replayer(log, name, workers).weights_at(source.version)
    ref = await log.blobs.write_snapshot(name, version, "weights", snapshot_tensors(fragment.layout, weights))
    return RollbackFragment(name, version, source.version, source.digest, (ref,), ())


def closed_without(state: RunState, view: MembershipView, closing: ClosedItem, delta: str) -> ClosedItem | None:
    """Returns the item that freezes a set again without an unreadable delta; None if that is not one of the set."""
    members = tuple(member for member in closing.members if member.delta != delta)
    if len(members) == len(closing.members):
        return None
    decided = (Decided(delta, Fate.QUARANTINED, "its stored parts can't be read"),)
    fragment = state.fragments[closing.fragment]
    return closed_round(state, fragment, view, members, attempt=closing.attempt + 1, decided=decided)


def _void(closing: ClosedItem) -> ClosedItem:
    reason = "the state that it was to be merged into is lost"
    decided = tuple(Decided(member.delta, Fate.EXPIRED, reason) for member in closing.members)
    return ClosedItem(closing.fragment, closing.version, closing.attempt + 1, (), 1.0, decided)
