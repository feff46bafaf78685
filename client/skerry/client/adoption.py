"""Pulls a newer version and adopts it: workers prepare the change, the training thread makes it at a step boundary."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from skerry.algorithm.rebase import FlatArray, Ledger
from skerry.client.parameters import Work
from skerry.client.pull import Pulled, PullSettings, pull
from skerry.client.session import Adoption, Session
from skerry.v1 import exchange_pb2
from skerry.wire import FragmentLayout


async def pull_newest(
    session: Session,
    layout: FragmentLayout,
    *,
    version: int = -1,
    weights: NDArray[np.float32] | None = None,  # (numel,) of `version`; not written to
) -> Pulled:
    """Returns a fragment's newest version, by way of updates to `weights` or of a snapshot.

    Raises:
        SkerryError: as `pull`.
    """
    settings = session.settings
    request = exchange_pb2.PullFragmentRequest(
        run=settings.run,
        run_uid=session.run_uid,
        seen_position=session.position,
        fragment=layout.name,
        from_version=-1 if weights is None else version,
        is_newest=True,
    )
    async with session.transfers:
        pulled = await pull(
            session.calls.transport,
            session.workers,
            request,
            layout,
            weights,
            settings=PullSettings(settings.stall_timeout_s, session.calls.retry),
            count_bytes=session.tally.received,
        )
    session.saw(pulled.position)
    return pulled


async def adopt(
    session: Session,
    layout: FragmentLayout,
    ledger: Ledger,
    pulled: Pulled,
    *,
    is_merged: bool,
    must_replace: bool,
) -> Ledger:
    """Returns the ledger after the weights were changed at a step boundary.

    `is_merged`: the delta in flight is in `pulled`; `must_replace`: local work must not be kept.
    """
    on_device = await session.workers.run(session.parameters.from_host, pulled.weights)
    if must_replace or session.settings.adoption is not Adoption.REBASE:
        return await _overwrite(session, layout, ledger, pulled, on_device=on_device, must_replace=must_replace)

    def prepare() -> Work:
        shift = ledger.shift(on_device, is_merged=is_merged)
        session.parameters.settle()
        return session.parameters.add(layout, shift)

    add = await session.workers.run(prepare)
    base = on_device
    around = await _change(session, layout, add, is_rounded=not session.parameters.is_float32(layout))
    if around is not None:
        base = await session.workers.run(lambda: ledger.rounded_base(*around, is_merged=is_merged))
    return ledger.rebased(pulled.version, pulled.digest, pulled.weights, base, is_merged=is_merged)


async def _overwrite(
    session: Session,
    layout: FragmentLayout,
    ledger: Ledger,
    pulled: Pulled,
    *,
    on_device: FlatArray,
    must_replace: bool,
) -> Ledger:
    """Replaces the weights, or blends into them; unsent work is lost."""
    is_blend = session.settings.adoption is Adoption.BLEND and not must_replace
    trained = session.trained
    parameters = session.parameters
    overwrite = (
        parameters.blend(layout, on_device, session.settings.blend_alpha)
        if is_blend
        else parameters.load(layout, on_device)
    )

    def change() -> None:
        nonlocal trained
        overwrite()
        trained = session.trained

    is_rounded = is_blend or not session.parameters.is_float32(layout)
    around = await _change(session, layout, change, is_rounded=is_rounded)
    base = on_device if around is None else around[1]
    return ledger.replaced(pulled.version, pulled.digest, pulled.weights, base, trained)


async def _change(
    session: Session, layout: FragmentLayout, change: Work, *, is_rounded: bool
) -> tuple[FlatArray, FlatArray] | None:
    """Makes the change at a step boundary; if it rounds, returns the weights before and after."""
    parameters = session.parameters
    if not is_rounded:
        await session.boundary.run(change)
        return None
    before = await session.workers.run(parameters.buffer, layout)
    after = await session.workers.run(parameters.buffer, layout)

    copy_before = await session.workers.run(parameters.snapshot, layout, before)
    copy_after = await session.workers.run(parameters.snapshot, layout, after)

    def copied() -> None:
        copy_before()
        change()
        copy_after()

    await session.boundary.run(copied)
    return before, after
