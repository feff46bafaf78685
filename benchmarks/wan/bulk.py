"""A learner of which only the transfers are timed: encoded parts that go up, and the snapshots that come down to it.

Pushes wait until the deltas of all fragments are encoded, and go out together.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Final
from unittest.mock import patch

import numpy as np

from skerry.client import ArrayLearner, Policy, array_learner
from skerry.client.grpc_transport import GrpcTransport
from skerry.v1 import exchange_pb2
from skerry.wire.codecs import Codec, Compressor, Encoding

H: Final = 4096
_EARLY: Final = 512
FRAGMENTS: Final = 4  # as many as are sent at the same time
_TIMEOUT_S: Final = 120.0
_PLAIN: Final = Encoding(Codec.FLOAT32, compressor=Compressor.NONE)


class TimedTransport(GrpcTransport):
    """Notes when transfers begin and end, and the bytes of data in them."""

    current: TimedTransport

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._gate = asyncio.Event()
        self.loop = asyncio.get_running_loop()
        TimedTransport.current = self
        self.forget()
        self._gate.set()  # the first learner sends the initial weights, one fragment after another

    def forget(self) -> None:
        """Begins anew."""
        self.begin_s, self.end_s, self.size_bytes, self._waiting = float("inf"), 0.0, 0, 0
        self._gate.clear()

    def facts(self) -> dict[str, float]:
        """Returns the time from the first to the last, and the bytes."""
        return {"wall_s": self.end_s - self.begin_s, "size_bytes": self.size_bytes}

    async def push_delta(
        self, requests: AsyncIterator[exchange_pb2.PushDeltaRequest]
    ) -> exchange_pb2.PushDeltaResponse:
        """Sends a push when all are there."""
        self._waiting += 1
        if self._waiting == FRAGMENTS:
            self._gate.set()
        await self._gate.wait()
        self.begin_s = min(self.begin_s, time.monotonic())
        response = await super().push_delta(self._counted(requests))
        self.end_s = time.monotonic()
        return response

    async def _counted(
        self, requests: AsyncIterator[exchange_pb2.PushDeltaRequest]
    ) -> AsyncIterator[exchange_pb2.PushDeltaRequest]:
        async for request in requests:
            self.size_bytes += request.ByteSize()
            yield request

    async def pull_fragment(
        self, request: exchange_pb2.PullFragmentRequest
    ) -> AsyncGenerator[exchange_pb2.PullFragmentResponse, None]:
        """Opens a download."""
        self.begin_s = min(self.begin_s, time.monotonic())
        responses = super().pull_fragment(request)
        try:
            async for response in responses:
                self.size_bytes += response.ByteSize()
                yield response
        finally:
            self.end_s = time.monotonic()
            await responses.aclose()


def main() -> None:
    """Joins, then pushes as often as it is told."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--numel", type=int, required=True)
    arguments = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    patch.object(array_learner, "GrpcTransport", TimedTransport).start()
    rows = arguments.numel // FRAGMENTS // 1024
    arrays = {f"matrix.{index}": np.zeros((rows, 1024), np.float32) for index in range(FRAGMENTS)}
    learner = ArrayLearner(
        arrays,
        target=arguments.target,
        run="wan",
        learner_id=arguments.name,
        create=True,
        policy=Policy(inner_step_count=H, grace_factor=0.0, delta_encoding=_PLAIN, update_encoding=_PLAIN),
        fragment_count=FRAGMENTS,
        connect_timeout_s=_TIMEOUT_S,
    )
    transport, source = TimedTransport.current, np.random.default_rng(0)
    print(json.dumps(transport.facts()), file=answers, flush=True)
    for _ in sys.stdin:
        for array in arrays.values():
            np.add(array, source.standard_normal(array.shape, np.float32), out=array)
        transport.loop.call_soon_threadsafe(transport.forget)
        learner.step(1)
        if not learner.flush(_TIMEOUT_S):
            raise TimeoutError("the push was not acknowledged")
        print(json.dumps(transport.facts()), file=answers, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
