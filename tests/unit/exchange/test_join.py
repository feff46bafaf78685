"""How a learner comes to its run: it finds it, or creates it from exactly its own weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from skerry.errors import PoisonedError, RunExistsError, RunNotFoundError
from skerry.exchange.join import find_or_create
from skerry.v1 import exchange_pb2 as v1
from skerry.v1 import runs_pb2, types_pb2
from skerry.wire import Codec, Compressor, Encoding, FragmentLayout, TensorSpec
from skerry.wire.digests import delta_digest
from skerry.wire.frames import encode_frames
from tests.support.heard_logs import heard_logs
from tests.support.scripted_transport import ScriptedTransport, quick_calls, scripted_session

WEIGHTS = np.array([1.5, -2, 0], np.float32)
MISSING = RunNotFoundError("RUN_NOT_FOUND", "no such run", metadata={"similar_names": "fir"})
DRAFT = runs_pb2.CreateRunResponse(run=types_pb2.Run(name="fit", uid="u1", position=3))
ACCEPTED = v1.PushDeltaResponse(state=v1.PUSH_STATE_ACCEPTED, position=7)
COMMITTED = runs_pb2.CommitRunResponse(run=types_pb2.Run(name="fit", uid="u1", position=8))


def run(uid: str, *learners: tuple[str, bool]) -> runs_pb2.GetRunResponse:
    """Returns a run with learners by id, and whether they are live."""
    statuses = [types_pb2.LearnerStatus(learner_id=learner, is_live=is_live) for learner, is_live in learners]
    return runs_pb2.GetRunResponse(run=types_pb2.Run(name="fit", uid=uid), learners=statuses)


async def joined(*, create: bool = True, weights: Any = WEIGHTS, **scripts: Any) -> tuple[Any, Any, ScriptedTransport]:
    """Returns the run, how the learner came to it, and what it asked."""
    transport = ScriptedTransport(**scripts)
    session = scripted_session(quick_calls(transport), {"w": weights.copy()}, create=create)
    found, joining = await find_or_create(session)
    return found, joining, transport


async def test_a_run_that_exists_is_joined_and_its_other_live_learners_are_counted() -> None:
    answer = run("u1", ("us", True), ("eu", True), ("asia", False))
    found, joining, transport = await joined(GetRun=[answer])
    assert (found.uid, joining.is_created, joining.other_count) == ("u1", False, 1)
    assert [name for name, _ in transport.asked] == ["GetRun"]


async def test_a_run_that_is_created_has_exactly_the_models_weights() -> None:
    with heard_logs() as logs:
        found, joining, transport = await joined(
            GetRun=[MISSING], CreateRun=[DRAFT], push_delta=[ACCEPTED], CommitRun=[COMMITTED]
        )
    assert [line["others"] for line in logs if "similar names" in line["event"]] == ["fir"]
    assert (found.uid, joining.is_created) == ("u1", True)
    (_, _), (_, create), (_, push), (_, commit) = transport.asked
    header, begin, data, end, complete = push
    layout = FragmentLayout(header.header.fragment, (TensorSpec("w", (3,)),))
    digest = blake3()
    raw = Encoding(Codec.FLOAT32, compressor=Compressor.NONE)
    expected = b"".join(encode_frames(WEIGHTS, layout, raw, digest=digest))
    assert data.data == expected
    assert WEIGHTS.tobytes() in expected
    assert (begin.part.first, begin.part.numel, begin.part.size_bytes) == (0, 3, len(expected))
    assert end.part_end.digest == digest.digest()
    assert complete.complete.digest == delta_digest([(0, 3, digest.digest())])
    assert (header.header.run_uid, header.header.base_version, header.header.learner_id) == ("u1", -1, "us")
    assert header.header.session_id == create.request_id
    assert (commit.run_uid, commit.seen_position) == ("u1", 7)


async def test_the_second_creator_joins_the_run_of_the_first() -> None:
    found, joining, _ = await joined(GetRun=[MISSING, run("u2")], CreateRun=[RunExistsError("RUN_EXISTS", "taken")])
    assert (found.uid, joining.is_created) == ("u2", False)


async def test_a_run_is_not_created_where_nobody_asked_for_it() -> None:
    with pytest.raises(RunNotFoundError):
        await joined(create=False, GetRun=[MISSING])


async def test_initial_weights_that_are_not_finite_are_refused_before_they_are_sent() -> None:
    with pytest.raises(PoisonedError, match="initial weights are not finite"):
        await joined(weights=np.array([1, np.nan, 0], np.float32), GetRun=[MISSING], CreateRun=[DRAFT])
