"""A learner of which only the transfers are timed: encoded parts that go up, and the snapshots that come down to it.

The model is one fragment, so each transfer is one stream.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Final
from unittest.mock import patch

import numpy as np

from benchmarks.dialogue import Dialogue
from skerry import ArrayLearner, Policy, array_learner
from skerry.net.grpc_transport import GrpcTransport
from skerry.v1 import exchange_pb2
from skerry.wire.codecs import Codec, Compressor, Encoding

H: Final = 1  # a delta of fewer steps opens no round
_TIMEOUT_S: Final = 120.0
_PLAIN: Final = Encoding(Codec.FLOAT32, compressor=Compressor.NONE)


class Timed:
    """The time from the first transfer's begin to the last one's end, and the bytes of their messages."""

    def __init__(self) -> None:
        self.begin_s, self.end_s, self.size_bytes = float("inf"), 0.0, 0

    def begin(self) -> None:
        """Takes note that a transfer begins."""
        self.begin_s = min(self.begin_s, time.monotonic())

    def end(self) -> None:
        """Takes note that a transfer has ended."""
        self.end_s = time.monotonic()

    def facts(self) -> dict[str, float]:
        """Returns what was noted."""
        return {"wall_s": self.end_s - self.begin_s, "size_bytes": self.size_bytes}


class TimedTransport(GrpcTransport):
    """Times the transfers. A delta is encoded before its push begins."""

    current: TimedTransport

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.pushes, self.pulls = Timed(), Timed()
        TimedTransport.current = self

    async def push_delta(
        self, requests: AsyncIterator[exchange_pb2.PushDeltaRequest]
    ) -> exchange_pb2.PushDeltaResponse:
        """Sends a push."""
        pushes = self.pushes
        pushes.begin()
        response = await super().push_delta(self._counted(requests, pushes))
        pushes.end()
        return response

    @staticmethod
    async def _counted(
        requests: AsyncIterator[exchange_pb2.PushDeltaRequest], pushes: Timed
    ) -> AsyncIterator[exchange_pb2.PushDeltaRequest]:
        async for request in requests:
            pushes.size_bytes += request.ByteSize()
            yield request

    async def pull_fragment(
        self, request: exchange_pb2.PullFragmentRequest
    ) -> AsyncGenerator[exchange_pb2.PullFragmentResponse, None]:
        """Opens a download."""
        self.pulls.begin()
        responses = super().pull_fragment(request)
        try:
            async for response in responses:
                self.pulls.size_bytes += response.ByteSize()
                yield response
        finally:
            self.pulls.end()
            await responses.aclose()


def main() -> None:
    """Joins, then pushes as often as it is told."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--numel", type=int, required=True)
    arguments = parser.parse_args()
    dialogue = Dialogue()
    patch.object(array_learner, "GrpcTransport", TimedTransport).start()
    weights = np.zeros((arguments.numel // 1024, 1024), np.float32)
    learner = ArrayLearner(
        {"matrix": weights},
        target=arguments.target,
        run="wan",
        learner_id=arguments.name,
        create=True,
        policy=Policy(inner_step_count=H, grace_factor=0.0, delta_encoding=_PLAIN, update_encoding=_PLAIN),
        fragment_count=1,
        connect_timeout_s=_TIMEOUT_S,
        tls="insecure",
    )
    transport, source = TimedTransport.current, np.random.default_rng(0)
    dialogue.answer(**transport.pulls.facts())
    for _ in dialogue.commands():
        weights += source.standard_normal(weights.shape, np.float32)
        transport.pushes = Timed()
        learner.step(1)
        if not learner.flush(_TIMEOUT_S):
            raise TimeoutError("the push was not acknowledged")
        while not transport.pushes.end_s:  # an event may tell of the acknowledgement before the push has its answer
            time.sleep(0.001)
        dialogue.answer(**transport.pushes.facts())
    os._exit(0)


if __name__ == "__main__":
    main()
