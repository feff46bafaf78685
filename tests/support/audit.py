"""Checks the log of a finished run by folding it, without the syncer."""

from __future__ import annotations

from skerry_syncer.store.log.entries import Fate
from skerry_syncer.store.log.state import RunState
from skerry_syncer.store.maintenance.checking import verify_run
from skerry_syncer.store.objects.interface import Objects
from skerry_syncer.store.versions.scratch import Scratch
from tests.support.log_bench import store_on
from tests.support.whole_history import WholeHistory


async def final_state(objects: Objects, name: str, uid: str) -> RunState:
    """Returns the fold of the log, after checking that merging each version again gives the same digest."""
    store = store_on(objects)
    run = await store.open_run(name, uid)
    report = await verify_run(run, scratch=Scratch(None))
    assert report.ok, [str(problem) for problem in report.problems]
    history = WholeHistory(run.spec)
    async for entry, data in run.log.entries():
        history.apply(entry, data)
    for fragment in history.state.fragments.values():
        assert sorted(fragment.versions) == list(range(fragment.version + 1)), "versions are continuous"
    await store.close()
    return history.state


def check_fates(state: RunState, acknowledged: set[str]) -> dict[Fate, int]:
    """Checks that every acknowledged delta has one final fate in the log, and that each merged one was merged once."""
    merged: list[str] = []
    for fragment in state.fragments.values():
        for version in fragment.versions.values():
            if version.commit is not None:
                merged += [member.delta for member in version.commit.close.members]
    assert len(merged) == len(set(merged)), "a delta was merged twice"
    assert acknowledged <= state.deltas.keys(), "an acknowledged delta is not in the log"
    counts = dict.fromkeys(Fate, 0)
    for name, delta in state.deltas.items():
        counts[delta.fate] += 1
        assert delta.fate is not Fate.PENDING, name
        is_initial = delta.item.base_version < 0
        assert is_initial or (delta.fate is Fate.MERGED) == (name in merged), name
    return counts
