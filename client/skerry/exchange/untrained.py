"""What a model has besides the tensors that a run trains: whether it is what the run's other learners have."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Final

from skerry.errors import error_of
from skerry.exchange.session import Session
from skerry.runtime.logs import get_logger
from skerry.v1 import types_pb2
from skerry.wire.messages import untrained_from_messages
from skerry.wire.untrained import UntrainedTensor

_log = get_logger(__name__)

_NAMED: Final = 3  # in a message


async def check_untrained(session: Session, run: types_pb2.Run) -> None:
    """Checks that the frozen parameters are those of the run's creator, and warns of what is not checked or shared.

    Raises:
        RefusedError: FROZEN_DIFFERS: they are others, and the settings don't allow that.
    """
    own = await session.workers.run(session.parameters.untrained)
    if loose := [tensor.name for tensor in own if tensor.checksum is None]:
        _log.warning(
            "buffers, and frozen parameters that are offloaded, quantised, sparse or nested, are neither synchronised "
            "nor compared: each learner keeps its own values, and exports take them from --base",
            **session.facts,
            count=len(loose),
            names=loose[:_NAMED],
        )
    theirs = [tensor for tensor in untrained_from_messages(run.untrained) if tensor.checksum is not None]
    if not theirs:
        if any(tensor.checksum is not None for tensor in own):
            _log.warning(
                "the run has no record of frozen parameters: whether learners have the same is not checked",
                **session.facts,
            )
        return
    differences = dict(_differences(own, theirs))
    allowed = session.settings.allow_other_frozen
    if refused := [difference for name, difference in differences.items() if not may_differ(name, allowed=allowed)]:
        raise error_of(
            "FROZEN_DIFFERS",
            "the model's frozen parameters are not those that the run was created with, so its deltas would be for "
            "another model. Load the same base; or pass allow_other_frozen, with the names of those that differ on "
            f"purpose, as where they are quantised. {_counted(refused, theirs)}",
        )
    if differences:
        _log.warning(
            "frozen parameters are not those that the run was created with, as allowed",
            **session.facts,
            differences=_counted(list(differences.values()), theirs),
        )


def may_differ(name: str, *, allowed: bool | Collection[str]) -> bool:
    """Returns whether a frozen parameter may have other values: `allowed` has names, or patterns as of a shell."""
    if isinstance(allowed, bool):
        return allowed
    return any(fnmatchcase(name, pattern) for pattern in ([allowed] if isinstance(allowed, str) else allowed))


def _counted(differences: Sequence[str], theirs: Sequence[UntrainedTensor]) -> str:
    return f"differences={len(differences)} of {len(theirs)}, first={'; '.join(differences[:_NAMED])}"


def _differences(own: Iterable[UntrainedTensor], theirs: Iterable[UntrainedTensor]) -> Iterator[tuple[str, str]]:
    """Yields the name of each frozen parameter that differs, and in words how."""
    here, there = ({tensor.name: tensor for tensor in side if tensor.checksum is not None} for side in (own, theirs))
    unread = {tensor.name for tensor in own} - here.keys()  # such as parameters that were offloaded to a disk
    for name in sorted(here.keys() | there.keys() - unread):
        if name not in here or name not in there:
            yield name, f"{name} is only in the {'run' if name in there else 'model'}"
        elif here[name] != there[name]:
            ours, run = (f"{tensor.dtype}{list(tensor.shape)}" for tensor in (here[name], there[name]))
            yield name, f"{name} has other values" if ours == run else f"{name} is {ours} here and {run} in the run"
