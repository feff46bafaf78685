"""Finds a run or creates it.

A run is created from initial weights: a draft, the weights of every fragment, a commit. Each step may be repeated.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from skerry.errors import PoisonedError, RunExistsError, RunNotFoundError, SkerryError, error_of, is_transient
from skerry.exchange.push import Delta, encode_parts, push
from skerry.exchange.session import DEFAULT_PART_SIZE_BYTES, Calls, Session
from skerry.model.fragment_plan import FragmentPlan, plan_fragments
from skerry.runtime.logs import get_logger
from skerry.runtime.workers import Workers
from skerry.stats import Tally
from skerry.v1 import exchange_pb2, runs_pb2, types_pb2
from skerry.wire import Codec, Compressor, Encoding, FragmentLayout, NonFiniteError
from skerry.wire.frames import encode_frames
from skerry.wire.messages import (
    layouts_to_messages,
    pack_layout,
    policy_to_message,
    unpack_layout,
    untrained_to_messages,
)
from skerry.wire.policy import Policy

_log = get_logger(__name__)

# Version 0 has exactly the creator's weights, and weights do not compress.
INITIAL_ENCODING: Final = Encoding(codec=Codec.FLOAT32, compressor=Compressor.NONE)
INITIAL_BASE_VERSION: Final = -1


@dataclass(frozen=True)
class NewRun:
    """A run to be created."""

    name: str
    request_id: str
    plan: FragmentPlan
    dtypes: Mapping[str, str]
    policy: Policy
    untrained: Sequence[types_pb2.UntrainedTensor] = ()
    creator: str = "creator"  # the learner whose weights they are, if they are a learner's


async def create_run(
    calls: Calls,
    workers: Workers,
    new: NewRun,
    weights_of: Callable[[FragmentLayout], NDArray[np.float32]],
    *,
    part_size_bytes: int = DEFAULT_PART_SIZE_BYTES,
) -> types_pb2.Run:
    """Returns the open run. `weights_of` gives a fragment's flat weights, in a worker, as a copy.

    Raises:
        RunExistsError: another run has the name, or another creator was first; the draft stays invisible.
        PoisonedError: initial weights are not finite.
        SkerryError: as the server answered.
    """
    tensors, fragments = layouts_to_messages(new.plan.fragments, new.dtypes)
    request = runs_pb2.CreateRunRequest(
        request_id=new.request_id,
        name=new.name,
        tensors=tensors,
        fragments=fragments,
        policy=policy_to_message(new.plan.policy(new.policy), has_derived=False),
        untrained=new.untrained,
    )
    pack_layout(request)
    draft = (await calls.retry.call(lambda: calls.ask(lambda stubs: stubs.runs.CreateRun, request))).run

    def encoded(layout: FragmentLayout) -> Delta:
        try:
            parts = encode_parts(encode_frames, weights_of(layout), layout, INITIAL_ENCODING, part_size_bytes)
        except NonFiniteError as error:
            raise PoisonedError("NON_FINITE", f"initial weights are not finite. {error}") from error
        header = exchange_pb2.PushHeader(
            run=new.name,
            run_uid=draft.uid,
            learner_id=new.creator,
            session_id=new.request_id,
            # The same when the creation is repeated with the same request id.
            delta_id=blake3(f"skerry.initial.v1\0{new.request_id}\0{layout.name}".encode()).hexdigest()[:32],
            fragment=layout.name,
            base_version=INITIAL_BASE_VERSION,
        )
        return Delta(header, parts)

    async def pushed(delta: Delta, position: int) -> int:
        response = await push(calls, delta, seen_position=position, stored=(), tally=Tally())
        if response.state != exchange_pb2.PUSH_STATE_ACCEPTED:
            raise error_of("INCOMPLETE", f"initial weights were not accepted. fragment={delta.header.fragment}")
        return max(position, response.position)

    position = draft.position
    for layout in new.plan.fragments:
        delta = await workers.run(encoded, layout)
        position = await calls.retry.call(partial(pushed, delta, position))
    commit = runs_pb2.CommitRunRequest(name=new.name, run_uid=draft.uid, seen_position=position)
    return (await calls.retry.call(lambda: calls.ask(lambda stubs: stubs.runs.CommitRun, commit))).run


class Joining(NamedTuple):
    """How a learner came to its run."""

    is_created: bool
    other_count: int  # live learners of other ids


async def find_or_create(session: Session) -> tuple[types_pb2.Run, Joining]:
    """Returns the run of the settings, with its tensors where they are not packed.

    One that does not exist is created from the model's weights, if allowed.

    The training thread must wait meanwhile.

    Raises:
        RunNotFoundError: no such run, and it may not be created.
    """
    request = runs_pb2.GetRunRequest(name=session.run)

    def find() -> Awaitable[runs_pb2.GetRunResponse]:
        return session.calls.ask(lambda stubs: stubs.runs.GetRun, request)

    is_created = False
    try:
        answer = await session.until_connected(find)
    except RunNotFoundError as error:
        if not session.settings.create:
            raise
        try:
            answer = runs_pb2.GetRunResponse(run=await _create_from_model(session))
        except RunExistsError:
            answer = await session.until_connected(find)  # another learner was faster
        else:
            is_created = True
            if similar_names := error.metadata.get("similar_names"):
                _log.warning(
                    "the run is new, and others have similar names: did you mean one of them?",
                    run=session.run,
                    others=similar_names,
                )
    own_id = session.settings.learner_id
    others = [learner for learner in answer.learners if learner.is_live and learner.learner_id != own_id]
    await session.workers.run(unpack_layout, answer.run)
    return answer.run, Joining(is_created, len(others))


async def _create_from_model(session: Session) -> types_pb2.Run:
    settings, parameters = session.settings, session.parameters
    new = NewRun(
        name=settings.run,
        request_id=session.entropy.hex_id(),
        plan=plan_fragments(parameters.tensors, fragment_count=settings.fragment_count),
        dtypes=parameters.dtypes,
        policy=settings.policy or Policy(),
        untrained=untrained_to_messages(await session.workers.run(parameters.untrained)),
        creator=settings.learner_id,
    )

    def weights_of(layout: FragmentLayout) -> NDArray[np.float32]:
        parameters.synchronize()
        buffer = parameters.buffer(layout)
        parameters.snapshot(layout, buffer)()
        return parameters.to_host(buffer)

    def is_worth_it(error: BaseException) -> bool:
        """Whether to repeat a call while somebody waits for the learner to begin."""
        is_full = isinstance(error, SkerryError) and error.reason == "STORE_FULL"
        is_soon = (getattr(error, "retry_after_s", None) or 0.0) <= settings.connect_timeout_s
        return is_transient(error) and is_soon and not is_full

    calls = replace(session.calls, retry=replace(session.calls.retry, is_worth_it=is_worth_it))
    return await create_run(calls, session.workers, new, weights_of, part_size_bytes=session.part_size_bytes)
