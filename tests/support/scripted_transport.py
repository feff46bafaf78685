"""A session of the exchange whose syncer is a script: no sockets, no threads, no clocks that run."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skerry.errors import is_transient
from skerry.exchange.boundary import Boundary
from skerry.exchange.session import Calls, Session
from skerry.exchange.settings import ExchangeSettings
from skerry.model.interface import ArrayParameters
from skerry.net.retry import Retry, RetrySettings
from skerry.runtime.workers import InlineWorkers
from skerry.v1 import exchange_pb2 as v1
from skerry.v1 import types_pb2
from skerry.wire import Codec, Compressor, Encoding, FragmentLayout
from skerry.wire.digests import tree_digest
from skerry.wire.frames import encode_frames
from tests.support.seeded_entropy import SeededEntropy
from tests.support.still_clock import StillClock

RAW = Encoding(Codec.FLOAT32, compressor=Compressor.NONE)


class ScriptedTransport:
    """Answers each call by the script of its name; takes note of what was asked."""

    def __init__(self, **scripts: Any) -> None:
        """A script is an iterator of answers, of lists of them for streams.

        An error is raised where it is met, and a function is called with what was asked.
        """
        self._scripts = {name: iter(answers) for name, answers in scripts.items()}
        self.asked: list[tuple[str, Any]] = []

    async def ask(self, _method: object, request: Any, *, timeout_s: float, **_: Any) -> Any:
        """Answers a unary call by the script that has the name of its method."""
        assert timeout_s > 0
        name = type(request).__name__.removesuffix("Request")
        self.asked.append((name, request))
        return _met(next(self._scripts[name]), request)

    async def attach(self, requests: AsyncIterator[v1.AttachRequest]) -> AsyncGenerator[v1.AttachResponse, None]:
        """Takes a request before each answer, and the rest of them after the last."""
        for answer in next(self._scripts["attach"]):
            self.asked.append(("attach", await anext(requests)))
            yield _met(answer)
        async for request in requests:
            self.asked.append(("attach", request))

    async def push_delta(self, requests: AsyncIterator[v1.PushDeltaRequest]) -> Any:
        """Takes the whole push."""
        push = [request async for request in requests]
        self.asked.append(("push_delta", push))
        return _met(next(self._scripts["push_delta"]), push)

    async def pull_fragment(self, request: v1.PullFragmentRequest) -> AsyncGenerator[v1.PullFragmentResponse, None]:
        """Sends what the script says of the request."""
        asked = v1.PullFragmentRequest()
        asked.CopyFrom(request)
        self.asked.append(("pull_fragment", asked))
        for answer in next(self._scripts["pull_fragment"])(asked):
            yield _met(answer)


def _met(answer: Any, request: Any = None) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer(request) if callable(answer) else answer


def update_object(
    layout: FragmentLayout, version: int, update: Any, *, first: int = 0, encoding: Encoding = RAW
) -> tuple[v1.PlanObject, bytes]:
    """Returns an object of a plan and its bytes; `update` is what it subtracts, and becomes what it is decoded as."""
    data = b"".join(encode_frames(update, layout, encoding, first=first, decoded=update))
    described = v1.PlanObject(
        name=f"{version}-{first}", kind=v1.OBJECT_KIND_UPDATE, version=version, first=first, numel=len(update),
        size_bytes=len(data),
    )  # fmt: skip
    return described, data


def plan_to(
    layout: FragmentLayout, version: int, digest: bytes, objects: Sequence[v1.PlanObject], *, from_version: int
) -> v1.PullPlan:
    """Returns a plan, which reflects log position 10 + `version`."""
    target = types_pb2.FragmentVersion(fragment=layout.name, version=version, digest=digest)
    return v1.PullPlan(from_version=from_version, target=target, objects=objects, position=10 + version)


def pull_to(layout: FragmentLayout, version: int, start: Any, weights: Any) -> Callable[[Any], Iterator[Any]]:
    """Returns the script of a download of `weights` by one update from the version before, whose weights are `start`.

    Whoever asks without having that version gets the update from zeros.
    """

    def answer(request: v1.PullFragmentRequest) -> Iterator[v1.PullFragmentResponse]:
        target = np.array(weights, np.float32)
        update = (np.array(start, np.float32) if request.from_version >= 0 else np.zeros_like(target)) - target
        described, data = update_object(layout, version, update)
        plan = plan_to(layout, version, tree_digest(target), [described], from_version=request.from_version)
        yield v1.PullFragmentResponse(plan=plan)
        yield v1.PullFragmentResponse(data=v1.PullData(data=data))

    return answer


def accepted(push: Sequence[v1.PushDeltaRequest]) -> v1.PushDeltaResponse:
    """Returns the answer that a push's delta is in the log and pending."""
    header = push[0].header
    fate = types_pb2.DeltaFate(fragment=header.fragment, delta_id=header.delta_id, fate=types_pb2.FATE_PENDING)
    return v1.PushDeltaResponse(state=v1.PUSH_STATE_ACCEPTED, position=7, fate=fate)


def quick_calls(transport: Any, **rules: Any) -> Calls:
    """Returns calls that are repeated after a millisecond or two."""
    quick = RetrySettings(first_wait_s=0.001, longest_wait_s=0.002)
    return Calls(transport, Retry(quick, random.Random(2), is_transient), **rules)


def scripted_session(calls: Calls, arrays: Mapping[str, NDArray[np.float32]], **settings: Any) -> Session:
    """Returns a session of the learner "us" in the run "fit", on the running loop."""
    return Session(
        calls,
        ArrayParameters(arrays),
        ExchangeSettings(run="fit", learner_id="us", **settings),
        workers=InlineWorkers(),
        entropy=SeededEntropy(random.Random(1)),
        boundary=Boundary(StillClock(), asyncio.get_running_loop().call_soon),
    )
