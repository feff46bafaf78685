"""How a learner joins a run: it finds the run, or creates it from its own weights."""

from __future__ import annotations

from collections.abc import Awaitable

import numpy as np
import structlog
from numpy.typing import NDArray

from skerry.client.creation import NewRun, create_run
from skerry.client.errors import RunExistsError, RunNotFoundError
from skerry.client.fragment_plan import plan_fragments
from skerry.client.session import Session
from skerry.v1 import runs_pb2, types_pb2
from skerry.wire import FragmentLayout
from skerry.wire.policy import OuterSchedule, Policy

_log = structlog.get_logger(__name__)


async def find_or_create(session: Session) -> types_pb2.Run:
    """Returns the run of the settings; one that does not exist is created from the model's weights, if allowed.

    The training thread must wait meanwhile.

    Raises:
        RunNotFoundError: no such run, and it may not be created.
    """
    settings = session.settings
    request = runs_pb2.GetRunRequest(name=settings.run)

    def find() -> Awaitable[runs_pb2.GetRunResponse]:
        return session.calls.transport.get_run(request, timeout_s=settings.call_timeout_s)

    try:
        return (await session.until_connected(find)).run
    except RunNotFoundError:
        if not settings.may_create:
            raise
    try:
        return await _create(session)
    except RunExistsError as error:
        _log.info("another learner created the run, joining it", run=settings.run, uid=error.uid)
    return (await session.until_connected(find)).run


def warn_of_other_plan(session: Session) -> None:
    """Warns if this learner plans another length than the run that it joined: outer momentum follows the run's."""
    own, runs = session.settings.policy, session.policy
    planned = own.planned_step_count if own else 0
    settles = runs.outer.schedule is not OuterSchedule.CONSTANT and runs.outer.momentum > 0
    if not planned or planned == runs.planned_step_count or not settles:
        return
    what = "is planned for another number of steps" if runs.planned_step_count else "has no planned length"
    _log.warning(
        f"the run {what}; the run's value holds. To change it: "
        f"skerry runs policy {session.settings.run} --set planned_step_count={planned}",
        run_steps=runs.planned_step_count,
        own_steps=planned,
    )


async def _create(session: Session) -> types_pb2.Run:
    settings, parameters = session.settings, session.parameters
    new = NewRun(
        name=settings.run,
        request_id=session.entropy.hex_id(),
        plan=plan_fragments(parameters.tensors, fragment_count=settings.fragment_count),
        dtypes=parameters.dtypes,
        policy=settings.policy or Policy(),
    )

    def weights_of(layout: FragmentLayout) -> NDArray[np.float32]:
        buffer = parameters.buffer(layout)
        parameters.snapshot(layout, buffer)()
        return parameters.to_host(buffer)

    run = await create_run(session.calls, session.workers, new, weights_of, part_size_bytes=session.part_size_bytes)
    _log.info("created the run", run=run.name, uid=run.uid, fragments=len(run.fragments))
    return run
