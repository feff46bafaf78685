"""A learner's account with its run, for the learner's own checkpoint: the work that is not sent or not merged yet.

Of each fragment it has u and q of `skerry.algorithm.rebase`, and the counts of steps that they stand for, but neither
the weights nor the anchor. A learner that goes on from it, at whatever version A' the run is by then, sets

    theta = A' - q - u                                  (1)  where q is in flight still, or returns to u
    theta = A' - u                                      (2)  where q was merged into A' or an earlier version

as if its link had been down since. That holds as long as the run has taken no later delta of the learner: it would
hold u too. So the account names the last delta that was accepted, and q. The answer to an attach names the last one
that the run knows, and no older session can send another: if it is neither of the two, the work is dropped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from skerry.algorithm.rebase import FlatArray, Ledger, Trained
from skerry.errors import error_of
from skerry.exchange.fragment import FragmentExchange
from skerry.exchange.push import Delta, earlier_delta, query
from skerry.exchange.session import Adoption, Session
from skerry.exchange.states import RETURNING, Idle, InFlight, Replacing, Sending, behind
from skerry.runtime.logs import get_logger
from skerry.v1 import exchange_pb2, types_pb2

_log = get_logger(__name__)

_FORMAT: Final = 1


async def save(session: Session, fragments: Mapping[str, FragmentExchange]) -> dict[str, Any]:
    """Returns the account at a step boundary, as plain values and float32 vectors, which are not written to.

    The training thread takes no step meanwhile. Vectors are what `Parameters.keep` makes of them.
    """
    session.is_saving, session.saved_at = True, session.trained
    try:
        saved = {name: await _saved(session, one) for name, one in fragments.items()}
        if session.is_over:  # it may have been stopped between a change of weights and that of their ledger
            return without_work(session, fragments)
        return _account(session, saved)
    finally:
        session.is_saving = False
        for one in fragments.values():
            one.wake()


def without_work(session: Session, fragments: Mapping[str, FragmentExchange]) -> dict[str, Any]:
    """Returns the account of a learner that exchanges no more: only its counts."""
    saved = {name: _counts(session, one) for name, one in fragments.items()}
    for name, one in fragments.items():
        saved[name]["sent_until"] = [session.trained.step_count - one.unsent_step_count, 0]
    return _account(session, saved)


def _account(session: Session, fragments: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "run": session.run,
        "run_uid": session.run_uid,
        "learner_id": session.settings.learner_id,
        "step_count": session.trained.step_count,
        "token_count": session.trained.token_count,
        "fragments": fragments,
    }


def _counts(session: Session, fragment: FragmentExchange) -> dict[str, Any]:
    state = fragment.state
    # Work that is being replaced counts as sent, because it will never be sent.
    sent_until = session.trained if isinstance(state, Replacing) else state.ledger.sent_until
    return {
        "last_delta": session.last_deltas.get(fragment.layout.name),
        "contributed_step": sent_until.step_count if isinstance(state, Replacing) else state.contributed_step,
        "sent_until": list(sent_until),
        "unsent": None,
        "delta": None,
    }


async def _saved(session: Session, fragment: FragmentExchange) -> dict[str, Any]:
    """Returns what is saved of a fragment."""
    parameters, layout, run = session.parameters, fragment.layout, session.workers.run
    async with fragment.lock:
        weights = await run(parameters.buffer, layout)
        await session.boundary.run(await run(parameters.snapshot, layout, weights))
        state, counts = fragment.state, _counts(session, fragment)
    if isinstance(state, Replacing):
        return counts
    ledger = state.ledger

    def unsent() -> FlatArray:
        parameters.synchronize()
        rest = ledger.base - weights
        return parameters.keep(parameters.to_host(rest if ledger.in_flight is None else rest - ledger.in_flight))

    delta = None
    if isinstance(state, Sending | InFlight):
        delta = {
            "delta_id": state.delta.delta_id,
            "last_step": state.delta.last_step,
            "since": list(ledger.sent_until if ledger.in_flight is None else ledger.in_flight_since),
            "values": None if ledger.in_flight is None else parameters.to_host(ledger.in_flight),
        }
    return {**counts, "unsent": await run(unsent), "delta": delta}


@dataclass(frozen=True)
class _Continued:
    """What a fragment goes on with: the state, and the work that its model has on top of the version."""

    state: Idle | InFlight
    parts: tuple[Any, ...]  # u, or u and q, each (numel,) as it was given

    def work(self) -> NDArray[np.float32]:
        """Returns u, or q + u, `(numel,)`."""
        first, *rest = map(_array, self.parts)
        return sum(rest, start=first)


async def restore(session: Session, fragments: Mapping[str, FragmentExchange], account: Mapping[str, Any]) -> None:
    """Has a learner that was attached and has not trained go on with an account, as far as that can be done.

    Warns of unsent steps that are dropped.

    Raises:
        ValueError: it is no account, or not of this model.
        SkerryError: the syncer did not say what became of a delta. Nothing was changed.
    """
    trained, saved = _read(session, fragments, account)
    foreign = _foreign(session, account)
    dropped: dict[str, dict[str, int]] = defaultdict(dict)  # by reason, the steps of fragments
    async with AsyncExitStack() as stack:
        for one in fragments.values():
            await stack.enter_async_context(one.lock)
        found = {name: foreign or await _found(session, one, saved[name]) for name, one in fragments.items()}
        for name, one in fragments.items():
            what = found[name]
            if isinstance(what, _Continued):
                one.state = replace(what.state, ledger=await _load(session, one, what, trained))
            else:
                dropped[what][name] = trained.step_count - _since(saved[name])
                one.state = await _begun(session, one, trained)
            one.wake()
    facts = {"run": session.run, "learner": session.settings.learner_id, "step": trained.step_count}
    for reason, steps in dropped.items():
        if (most := max(steps.values())) > 0:
            _log.warning(
                "unsent work of the checkpoint is dropped", **facts, steps=most, fragments=sorted(steps), because=reason
            )
    _log.info("goes on from the checkpoint", **facts, continued=len(fragments) - sum(map(len, dropped.values())))


async def count_from(session: Session, fragments: Mapping[str, FragmentExchange], trained: Trained) -> None:
    """Has a learner that was attached and has not trained count on from `trained`, without work of its own."""
    async with AsyncExitStack() as stack:
        for one in fragments.values():
            await stack.enter_async_context(one.lock)
        for one in fragments.values():
            one.state = await _begun(session, one, trained)
            one.wake()


async def _begun(session: Session, fragment: FragmentExchange, trained: Trained) -> Idle | InFlight:
    """Returns the state of a fragment without own work, `trained` being counted; fragments are spread as at first."""
    await session.boundary.run(lambda: _count(session, trained))
    state = fragment.state
    assert isinstance(state, Idle | InFlight)
    step = state.contributed_step + trained.step_count
    begun = Idle(replace(state.ledger, sent_until=trained), step)
    if isinstance(state, Idle):
        return begun
    waiting = earlier_delta(session, fragment.layout, state.delta.delta_id, since=step, last_step=step)
    return behind(begun, waiting, state.fate)


def _count(session: Session, trained: Trained) -> None:
    session.trained = session.saved_at = trained


def _since(saved: Mapping[str, Any]) -> int:
    """Returns the step up to which the work is in deltas that are decided."""
    counts: list[int] = saved["delta"]["since"] if saved["delta"] else saved["sent_until"]
    return counts[0]


def _read(
    session: Session, fragments: Mapping[str, FragmentExchange], account: Mapping[str, Any]
) -> tuple[Trained, dict[str, dict[str, Any]]]:
    """Returns the counts, and for each fragment what is saved of it.

    Raises:
        ValueError: it is no account, or not of this model.
    """
    try:
        if account["format"] != _FORMAT:
            raise ValueError(f"the state is of another version of Skerry. format={account['format']}")
        trained, saved = Trained(account["step_count"], account["token_count"]), account["fragments"]
        if account["run_uid"] != session.run_uid:  # its fragments may be others
            since = min(map(_since, saved.values()))
            return trained, {name: {"sent_until": [since], "delta": None} for name in fragments}
        return trained, {name: _checked(saved[name], one.layout.numel) for name, one in fragments.items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"this is not what state_dict() of a learner of this model returned. cause={error!r}"
        ) from error


def _checked(saved: dict[str, Any], numel: int) -> dict[str, Any]:
    for vector in (saved["unsent"], saved["delta"] and saved["delta"]["values"]):
        if vector is not None and (actual := tuple(vector.shape)) != (numel,):
            raise ValueError(f"the state is of another model. expected={(numel,)}, actual={actual}")
    return saved


def _array(vector: Any) -> NDArray[np.float32]:
    """Returns a vector of an account, which may be a torch tensor, on the host."""
    return np.asarray(vector.cpu() if hasattr(vector, "cpu") else vector, np.float32)


def _foreign(session: Session, account: Mapping[str, Any]) -> str:
    """Returns why nothing of the account can be continued here, or nothing."""
    own = session.settings.learner_id
    if account["run_uid"] != session.run_uid:
        return f"it belongs to another run, of the name {account['run']}"
    if account["learner_id"] != own:
        return f"it belongs to another learner: give learner_id={account['learner_id']!r} to go on as that one"
    if session.settings.adoption is not Adoption.REBASE:
        return f"with adoption={session.settings.adoption.value!r} new versions replace unsent work"
    return ""


def _obstacle(known: str | None, saved: Mapping[str, Any]) -> str:
    """Returns why a fragment can't go on, or nothing; `known` is the last delta that the run has of the learner."""
    if saved["unsent"] is None:
        return "the learner did not exchange any more when it was saved"
    if known is None or saved["last_delta"] is None:
        return "the syncer is too old to say which delta of the learner is its last"
    if known not in {saved["last_delta"], saved["delta"] and saved["delta"]["delta_id"]}:
        return "the run has taken later work of the learner, which may hold it"
    return ""


async def _found(session: Session, fragment: FragmentExchange, saved: Mapping[str, Any]) -> _Continued | str:
    """Returns what a fragment goes on with, or why it can't; the caller holds its lock."""
    known = session.last_deltas.get(fragment.layout.name)
    if why := _obstacle(known, saved):
        return why
    delta, unsent = saved["delta"], saved["unsent"]
    ledger = replace(fragment.ledger, sent_until=Trained(*saved["sent_until"]))
    if delta is None:
        return _Continued(Idle(ledger, saved["contributed_step"]), (unsent,))
    work: tuple[Any, ...] = (unsent,)
    if delta["values"] is not None:
        ledger = replace(ledger, in_flight=delta["values"], in_flight_since=Trained(*delta["since"]))
        work = (unsent, delta["values"])
    sent = earlier_delta(
        session, fragment.layout, delta["delta_id"], since=delta["since"][0], last_step=delta["last_step"]
    )
    fate = await _fate(session, sent) if known == sent.delta_id else types_pb2.DeltaFate()
    if fate.fate == types_pb2.FATE_QUARANTINED and delta["values"] is not None:
        return "the learner's last delta was quarantined"
    # If it was never accepted it never will be: no session but this one can push now.
    if fate.fate in {*RETURNING, types_pb2.FATE_QUARANTINED, types_pb2.FATE_UNSPECIFIED}:
        return _Continued(Idle(ledger.returned(), saved["contributed_step"]), work)
    if fate.fate == types_pb2.FATE_MERGED and fate.version <= ledger.version:
        return _Continued(Idle(ledger.dropped(), delta["last_step"]), (unsent,))
    fragment.on_version(fate.version)
    return _Continued(InFlight(ledger, sent, saved["contributed_step"], fate), work)


async def _fate(session: Session, delta: Delta) -> types_pb2.DeltaFate:
    """Returns what became of an accepted delta, as of the version that the fragment has or later."""
    response = await session.calls.retry.call(lambda: query(session.calls, delta, seen_position=session.position))
    session.saw(response.position)
    if response.state != exchange_pb2.PUSH_STATE_ACCEPTED:
        raise error_of("STORE_ROLLED_BACK", f"the run lost a delta that it had accepted. delta={delta.delta_id}")
    return response.fate


async def _load(session: Session, fragment: FragmentExchange, continued: _Continued, trained: Trained) -> Ledger:
    """Puts the work into the model, on top of the version that it has, and returns the ledger."""
    parameters, layout, ledger = session.parameters, fragment.layout, continued.state.ledger
    work = await session.workers.run(continued.work)
    weights = await session.workers.run(lambda: parameters.from_host(ledger.anchor - work))
    load = await session.workers.run(parameters.load, layout, weights)
    copy = await session.workers.run(parameters.snapshot, layout, weights)

    def change() -> None:
        _count(session, trained)
        load()
        copy()  # what the model has made of it

    await session.boundary.run(change)

    def kept() -> Ledger:
        parameters.synchronize()
        base = ledger.base
        if not parameters.is_float32(layout):
            base = parameters.keep(weights + parameters.from_host(work))
        flying = ledger.in_flight
        if flying is not None:
            flying = parameters.keep(parameters.from_host(_array(flying)))
        return replace(ledger, base=base, in_flight=flying)

    return await session.workers.run(kept)
