"""The fold of a log, and all deltas and versions that it has forgotten, for checks of whole runs."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from skerry_syncer.store.log.entries import Entry, RunSpec
from skerry_syncer.store.log.fold import apply_entry
from skerry_syncer.store.log.state import Outcome, RunState

Key = TypeVar("Key")
Value = TypeVar("Value")


class WholeHistory:
    """What a replica makes of all entries (`folded`), and the same with everything that it forgets (`state`)."""

    def __init__(self, spec: RunSpec) -> None:
        """Starts before the first entry."""
        self.folded, self.state = RunState(spec), RunState(spec)

    def apply(self, entry: Entry, data: bytes) -> tuple[Outcome, ...]:
        """Applies the next entry, and returns what became of each of its items."""
        outcomes = apply_entry(self.folded, entry, data)
        before = self.state
        fragments = {
            name: replace(fragment, versions=_with(fragment.versions, before.fragments[name].versions))
            for name, fragment in self.folded.fragments.items()
        }
        deltas = _with(self.folded.deltas, before.deltas)
        vars(self.state).update(vars(self.folded) | {"deltas": deltas, "fragments": fragments})
        return outcomes


def _with(known: dict[Key, Value], before: dict[Key, Value]) -> dict[Key, Value]:
    """Returns what there was before, as it was then, followed by what is new."""
    return before | (known | before)
