"""The account of a learner of several ranks, which any number of ranks can go on from.

Where every rank holds the whole model, the first one has the account, and the others nothing. Where no rank does, each
has a share of it: of a vector of m elements, rank r of n those from m r / n to before m (r + 1) / n, and all the rest.
The ranks that go on from it send their shares to the leader, one vector after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from skerry.ranks.island import Island
from skerry.ranks.spread import Shelf, Spread
from skerry.runtime.identifiers import SystemEntropy
from skerry.runtime.logs import get_logger

_log = get_logger(__name__)

_SHARE: Final = "share"
_WHOLE: Final = {"number": 0, "count": 1, "save_id": ""}


def described(account: Mapping[str, Any], rank_count: int) -> dict[str, Any]:
    """Returns an account, whose vectors are spread over the ranks, as what JSON has: their keys instead of them."""

    def key_of(vector: Any) -> int:
        assert isinstance(vector, Spread)
        return vector.key

    share = {"count": rank_count, "save_id": SystemEntropy().hex_id()}
    return {**_mapped(account, key_of), _SHARE: share}


def share_of(told: Mapping[str, Any], shelf: Shelf, rank: int) -> dict[str, Any]:
    """Returns a rank's share of the account that `described` returned at the leader."""
    return {**_mapped(told, shelf.part), _SHARE: {**told[_SHARE], "number": rank}}


def joined(
    states: Sequence[Mapping[str, Any]],
    island: Island | None = None,
    keep: Callable[[Any], Any] = lambda vector: vector,
    *,
    drop_incomplete: bool = False,
) -> dict[str, Any] | None:
    """Returns the account of which the ranks have the shares; None if they have none, which is logged.

    With `drop_incomplete` it is also None, and logged, if the states are not all of one moment, or not complete.

    Every rank of an island must ask, with the states that it has, and the leader alone gets the account. Its vectors
    are what `keep` makes of them, so that one at a time is whole.

    Raises:
        ValueError: the states are not what `state_dict` returned, or not all of one moment, or not complete.
    """
    own = [state for state in states if state]
    said = [_said(state) for state in own]
    every = [said] if island is None else [rank["said"] for rank in island.all_gather({"said": said})]
    shares = [(rank, one) for rank, some in enumerate(every) for one in some]
    if not shares:
        _log.warning("there is no state to go on from: what the last processes had not sent is lost")
        return None
    _, first = shares[0]
    holders = {one["number"]: (rank, one["sizes"]) for rank, one in reversed(shares)}
    numbers = range(first["rest"][_SHARE]["count"])
    if problem := _problem(shares, missing=sorted(set(numbers) - holders.keys())):
        if not drop_incomplete:
            raise ValueError(problem)
        _log.warning("the state is dropped: what the last processes had not sent is lost", because=problem)
        return None
    mine = {_share(state)["number"]: list(_vectors(state)) for state in own}
    is_leader = island is None or island.is_leader
    whole: list[Any] = []
    for place in range(len(first["sizes"])):
        pieces = [_piece(island, mine, number, place, holders[number]) for number in numbers]
        if is_leader:
            whole.append(keep(torch.cat(pieces).numpy()))
    filled = iter(whole)
    return _mapped(first["rest"], lambda _: next(filled)) if is_leader else None


def _problem(shares: Sequence[tuple[int, Mapping[str, Any]]], *, missing: list[int]) -> str | None:
    """Returns why the shares do not make an account."""
    _, first = shares[0]
    if any(one["rest"] != first["rest"] for _, one in shares):
        return "the states that the ranks have are not of one moment: load those that were saved together"
    if missing:
        return (
            "each rank has saved a share of the state, and some are missing: give every rank those that it can read, "
            f"as a list. {missing=}, expected={first['rest'][_SHARE]['count']}"
        )
    return None


def _piece(
    island: Island | None, mine: Mapping[int, list[Any]], number: int, place: int, holder: tuple[int, list[int]]
) -> Any:
    """Returns a share of a vector at the leader, and sends it if this rank is the one that does."""
    rank, sizes = holder
    if island is None or island.rank == rank:
        piece = torch.as_tensor(mine[number][place], dtype=torch.float32).cpu().contiguous()
    elif island.is_leader:
        piece = torch.empty(sizes[place], dtype=torch.float32, device="cpu")
    else:
        return None
    if island is not None and rank != 0 and piece.numel():
        if island.is_leader:
            island.receive(piece, rank)
        else:
            island.send(piece, 0)
    return piece


def _share(state: Mapping[str, Any]) -> dict[str, Any]:
    return {**_WHOLE, **state.get(_SHARE, {})}


def _said(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a rank tells the others of a state: which share it is, and all of it but the values."""
    try:
        number = _share(state)["number"]
        sizes = [len(vector) for vector in _vectors(state)]
        rest = {**_mapped(state, lambda _: True), _SHARE: {**_share(state), "number": 0}}
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"this is not what state_dict() of a learner returned. cause={error!r}") from error
    return {"number": number, "sizes": sizes, "rest": rest}


def _vectors(state: Mapping[str, Any]) -> Iterator[Any]:
    for one in state["fragments"].values():
        yield from (v for v in (one["unsent"], one["delta"] and one["delta"]["values"]) if v is not None)


def _mapped(account: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Returns an account with its vectors changed, in the order of `_vectors`."""

    def changed(vector: Any) -> Any:
        return None if vector is None else change(vector)

    fragments = {
        name: {
            **one,
            "unsent": changed(one["unsent"]),
            "delta": one["delta"] and {**one["delta"], "values": changed(one["delta"]["values"])},
        }
        for name, one in account["fragments"].items()
    }
    return {**account, "fragments": fragments}
