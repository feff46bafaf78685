"""What an operator does to a simulated run: rolls it back, ejects learners, changes its policy, closes it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from skerry.errors import SkerryError
from skerry.net.transport import Method
from skerry.v1 import runs_pb2, types_pb2
from tests.simulation.learner_process import RUN
from tests.simulation.network import Network
from tests.simulation.records import LearnerRecord
from tests.simulation.sim_transport import SimTransport

R = TypeVar("R")

_CALL_S: Final = 20.0
_PATIENCE_S: Final = 60.0
_TRANSIENT: Final = frozenset({"UNREACHABLE", "TIMEOUT"})


class Operator:
    """A person with a command line, who repeats calls that were not answered, and no others."""

    def __init__(self, network: Network, count: Callable[[], int], ids: random.Random) -> None:
        """Calls over links of its own."""
        self._transport = SimTransport(network, LearnerRecord("operator", 0), count)
        self._ids = ids
        self.policy_changes: dict[str, types_pb2.Policy] = {}  # by request id: the fields that it changes

    async def roll_back(self, share: float) -> None:
        """Rolls the run back to this share of its log."""
        run = await self._repeat(self._found_run)
        if run is None:
            return
        request = runs_pb2.RollBackRequest(
            name=RUN,
            run_uid=run.uid,
            request_id=f"{self._ids.getrandbits(128):032x}",
            target_position=max(1, int(run.position * share)),
        )
        while (answer := await self._repeat(lambda: self._ask(lambda stubs: stubs.runs.RollBack, request))) is not None:
            if not answer.HasField("progress"):
                return

    async def eject(self, learner: str, for_s: float) -> bool:
        """Ejects a learner and readmits it `for_s` later; returns whether both were answered."""
        run = await self._repeat(self._found_run)
        if run is None or not await self._set_ejection(run.uid, learner, is_ejected=True):
            return False
        await asyncio.sleep(for_s)
        return await self._set_ejection(run.uid, learner, is_ejected=False)

    async def _set_ejection(self, run_uid: str, learner: str, *, is_ejected: bool) -> bool:
        request = runs_pb2.SetEjectionRequest(
            name=RUN,
            run_uid=run_uid,
            request_id=f"{self._ids.getrandbits(128):032x}",
            learner_id=learner,
            is_ejected=is_ejected,
        )
        return await self._repeat(lambda: self._ask(lambda stubs: stubs.runs.SetEjection, request)) is not None

    async def change_policy(self, inner_step_count: int) -> None:
        """Changes H, and beside it another field of the policy."""
        run = await self._repeat(self._found_run)
        if run is None:
            return
        changes = (
            types_pb2.Policy(inner_step_count=inner_step_count),
            types_pb2.Policy(grace_factor=inner_step_count / 16),
        )
        await asyncio.gather(*(self._set_policy(run.uid, change) for change in changes))

    async def _set_policy(self, run_uid: str, change: types_pb2.Policy) -> None:
        request = runs_pb2.SetPolicyRequest(
            name=RUN, run_uid=run_uid, request_id=f"{self._ids.getrandbits(128):032x}", policy=change
        )
        self.policy_changes[request.request_id] = change
        await self._repeat(lambda: self._ask(lambda stubs: stubs.runs.SetPolicy, request))

    async def close_run(self, within_s: float) -> bool:
        """Closes the run, trying again whatever is answered; returns whether it is closed in time."""
        until_s = asyncio.get_running_loop().time() + within_s
        run = await self._repeat(self._found_run, until_s=until_s)
        if run is None:
            return False
        request = runs_pb2.CloseRunRequest(name=RUN, run_uid=run.uid)
        closed = await self._repeat(lambda: self._ask(lambda stubs: stubs.runs.CloseRun, request), until_s=until_s)
        return closed is not None

    async def _found_run(self) -> types_pb2.Run:
        return (await self._ask(lambda stubs: stubs.runs.GetRun, runs_pb2.GetRunRequest(name=RUN))).run

    async def _ask(self, method: Method[R], request: object) -> R:
        return await self._transport.ask(method, request, timeout_s=_CALL_S)

    async def _repeat(self, call: Callable[[], Awaitable[R]], *, until_s: float | None = None) -> R | None:
        """Returns a call's answer; None where it was refused, or not answered in time."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + _PATIENCE_S if until_s is None else until_s
        while loop.time() < deadline_s:
            try:
                return await call()
            except SkerryError as error:
                if until_s is None and error.retry_after_s is None and error.reason not in _TRANSIENT:
                    return None
                await asyncio.sleep(1.0)
        return None
