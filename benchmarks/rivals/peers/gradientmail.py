"""GradientMail over an S3 server on the same link, with 4 bits both ways and a barrier after each step."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from typing import Any, Final

from benchmarks.rivals.peers import model
from benchmarks.rivals.peers.dialogue import converse

_TIMEOUT_S: Final = 120.0
_PORT: Final = 5998
_BUCKET: Final = "rivals"
_POLL_S: Final = 0.1  # the default is 1 s, most of which would be waiting
os.environ |= {"AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none", "AWS_DEFAULT_REGION": "us-east-1"}


class Learner:
    """A node that trains and takes part in closing rounds."""

    def __init__(self, arguments: Namespace) -> None:
        import torch
        from gradientmail import DiLoCo, S3Mailbox, Session  # type: ignore[import-not-found]

        parameters = {
            name.replace(".", "_"): torch.nn.Parameter(torch.from_numpy(array))
            for name, array in model.arrays().items()
        }
        self._module = torch.nn.ParameterDict(parameters)
        session = Session(
            self._module,
            algorithm=DiLoCo(
                sync_every=1,
                fragments=1,
                in_flight=1,
                overlap_steps=0,
                quorum_size=arguments.learners,
                delta_dtype="F4",
                commit_dtype="F4",
            ),
            mailbox=S3Mailbox(_BUCKET, "run", endpoint_url=arguments.target),
            node_id=f"learner-{arguments.number}",
            poll_interval=_POLL_S,
        )
        session.join()
        self._steps: queue.Queue[int] = queue.Queue()
        self._is_waiting = threading.Semaphore(0)
        threading.Thread(target=session.run, args=(lambda tokens: tokens, self._batches()), daemon=True).start()
        self._wait()

    def _batches(self) -> Iterator[int]:
        while True:
            self._is_waiting.release()
            yield self._steps.get()

    def _wait(self) -> None:
        if not self._is_waiting.acquire(timeout=_TIMEOUT_S):
            raise TimeoutError("GradientMail did not synchronise")

    def weights(self) -> list[Any]:
        """Returns the parameters' memory."""
        return [parameter.detach().numpy() for parameter in self._module.values()]

    def prepare(self) -> None:
        """Nothing is needed."""

    def synchronise(self) -> None:
        """Takes a step, which with `overlap_steps` of 0 waits for the round's commit and adopts it."""
        self._steps.put(1)
        self._wait()


def serve(_: Namespace) -> str:
    """Starts an S3 server with a bucket, and returns its URL."""
    import boto3

    subprocess.Popen([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(_PORT)])
    url, deadline_s = f"http://127.0.0.1:{_PORT}", time.monotonic() + _TIMEOUT_S
    while True:
        try:
            boto3.client("s3", endpoint_url=url).create_bucket(Bucket=_BUCKET)
        except Exception:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.2)
        else:
            return url


if __name__ == "__main__":
    converse(serve, Learner)
