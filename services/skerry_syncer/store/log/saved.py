"""The state of the fold as bytes, and back: what a log checkpoint has. FORMAT.md specifies it.

The fields are those of the state's own classes. What follows from others is left out: layouts, which `run.json` has,
pending deltas, and which delta a session has from which base.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, get_type_hints

import msgspec

from skerry_syncer.store.log.entries import FORMAT, Fate, RunSpec, check_format
from skerry_syncer.store.log.state import DeltaState, FragmentState, RunState, VersionState
from skerry_syncer.store.objects.interface import read_json


def _fields(kind: type, *others: str) -> dict[str, Any]:
    """Returns the types of the class's fields by name, without those that are saved in another way or not at all."""
    return {name: hint for name, hint in get_type_hints(kind).items() if name not in others}


_FRAGMENT: Final = _fields(FragmentState, "layout", "pending", "versions")
_RUN: Final = _fields(RunState, "spec", "forgets", "bases", "fragments", "deltas")
_SavedFragment: Any = msgspec.defstruct("_SavedFragment", [*_FRAGMENT.items(), ("versions", list[VersionState])])
_SavedRun: Any = msgspec.defstruct(
    "_SavedRun",
    [
        ("format", int),
        ("run_uid", str),
        *_RUN.items(),
        ("fragments", dict[str, _SavedFragment]),
        ("deltas", list[DeltaState]),  # in log order
    ],
)


def _values(source: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}


def state_to_bytes(state: RunState) -> bytes:
    """Returns the state; equal states give equal bytes."""
    fragments = {
        name: _SavedFragment(**_values(fragment, _FRAGMENT), versions=list(fragment.versions.values()))
        for name, fragment in state.fragments.items()
    }
    deltas = list(state.deltas.values())
    saved = _SavedRun(FORMAT, state.spec.uid, **_values(state, _RUN), fragments=fragments, deltas=deltas)
    return msgspec.json.encode(saved, order="deterministic")


def state_from_bytes(data: bytes, spec: RunSpec) -> RunState:
    """Returns the state that `state_to_bytes` gave; what the fold forgets is dropped from it.

    Raises:
        ValueError: not a state of this run that this version reads.
    """
    saved = read_json(data, _SavedRun)
    check_format(saved.format)
    if saved.run_uid != spec.uid:
        raise ValueError(f"not this run's checkpoint. run_uid={saved.run_uid}")
    state = RunState(spec, forgets=True, **_values(saved, _RUN))
    if saved.fragments.keys() != state.fragments.keys():
        raise ValueError("checkpoint is of other fragments")
    state.deltas = {delta.item.delta: delta for delta in saved.deltas}
    for name, fragment in saved.fragments.items():
        versions = {version.version: version for version in fragment.versions}
        layout = spec.fragment(name)
        state.fragments[name] = FragmentState(layout, **_values(fragment, _FRAGMENT), versions=versions)
    try:
        _derive(state)
    except KeyError as error:
        raise ValueError(f"checkpoint names a fragment that the run has not. fragment={error}") from error
    return state


def _derive(state: RunState) -> None:
    """Finds what the bytes leave out: pending deltas, and the last delta of a session from each base."""
    closings = [fragment.closing for fragment in state.fragments.values() if fragment.closing is not None]
    frozen = {member.delta for closing in closings for member in closing.members}
    for name, delta in state.deltas.items():
        fragment = state.fragments[delta.item.fragment]
        if delta.fate is Fate.PENDING and name not in frozen:
            fragment.pending[name] = delta
        if fragment.oldest == 0 or delta.item.base_version >= fragment.oldest:
            state.bases[delta.item.session, delta.item.fragment, delta.item.base_version] = name
