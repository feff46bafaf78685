"""The state of the fold as bytes, and back: what a log checkpoint has. FORMAT.md specifies it.

The fields are those of the state's own classes. What follows from others is left out: layouts, which `run.json` has,
pending deltas, and which delta a session has from which base.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Final, get_type_hints

import msgspec

from skerry.wire.policy import Policy
from skerry_syncer.store.log.entries import FORMAT, Fate, RunSpec, RunStatus, check_format
from skerry_syncer.store.log.state import DeltaState, FragmentState, LearnerState, RunState, VersionState
from skerry_syncer.store.objects.interface import read_json

_DERIVED: Final = frozenset({"layout", "pending"})
_FIELDS: Final = [field.name for field in fields(FragmentState) if field.name not in _DERIVED]
_HINTS: Final = get_type_hints(FragmentState) | {"versions": list[VersionState]}
_SavedFragment: Any = msgspec.defstruct("_SavedFragment", [(name, _HINTS[name]) for name in _FIELDS])


class _SavedState(msgspec.Struct, omit_defaults=True):
    """A checkpoint's JSON."""

    format: int
    run_uid: str
    position: int
    head_digest: str
    status: RunStatus
    policy: Policy
    checkpoint_at: int
    fragments: dict[str, _SavedFragment]
    deltas: list[DeltaState]  # in log order
    learners: dict[str, LearnerState]
    condemned_at: dict[str, int]
    requests: dict[str, int]
    age_s: float = 0.0


def state_to_bytes(state: RunState) -> bytes:
    """Returns the state; equal states give equal bytes."""
    saved = _SavedState(
        FORMAT,
        state.spec.uid,
        state.position,
        state.head_digest,
        state.status,
        state.policy,
        state.checkpoint_at,
        {name: _saved(fragment) for name, fragment in state.fragments.items()},
        list(state.deltas.values()),
        state.learners,
        state.condemned_at,
        state.requests,
        state.age_s,
    )
    return msgspec.json.encode(saved, order="deterministic")


def _saved(fragment: FragmentState) -> Any:
    values = {field: getattr(fragment, field) for field in _FIELDS}
    return _SavedFragment(**values | {"versions": list(fragment.versions.values())})


def state_from_bytes(data: bytes, spec: RunSpec) -> RunState:
    """Returns the state that `state_to_bytes` gave; what the fold forgets is dropped from it.

    Raises:
        ValueError: not a state of this run that this version reads.
    """
    saved = read_json(data, _SavedState)
    check_format(saved.format)
    if saved.run_uid != spec.uid:
        raise ValueError(f"not this run's checkpoint. run_uid={saved.run_uid}")
    state = RunState(spec, saved.policy, forgets=True)
    if saved.fragments.keys() != state.fragments.keys():
        raise ValueError("checkpoint is of other fragments")
    state.position, state.head_digest, state.status = saved.position, saved.head_digest, saved.status
    state.checkpoint_at, state.learners = saved.checkpoint_at, saved.learners
    state.requests, state.age_s = saved.requests, saved.age_s
    state.condemned_at.update(saved.condemned_at)
    for name, fragment in saved.fragments.items():
        values = msgspec.structs.asdict(fragment)
        values["versions"] = {version.version: version for version in fragment.versions}
        state.fragments[name] = FragmentState(state.fragments[name].layout, **values)
    state.deltas = {delta.item.delta: delta for delta in saved.deltas}
    try:
        _derive(state)
    except KeyError as error:
        raise ValueError(f"checkpoint names a fragment that the run has not. fragment={error}") from error
    return state


def _derive(state: RunState) -> None:
    """Finds what the bytes leave out: pending deltas, and the last delta of a session from each base."""
    frozen = {member.delta for one in state.fragments.values() if one.closing for member in one.closing.members}
    for name, delta in state.deltas.items():
        fragment = state.fragments[delta.item.fragment]
        if delta.fate is Fate.PENDING and name not in frozen:
            fragment.pending[name] = delta
        if fragment.oldest == 0 or delta.item.base_version >= fragment.oldest:
            state.bases[delta.item.session, delta.item.fragment, delta.item.base_version] = name
