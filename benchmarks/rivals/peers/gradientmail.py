"""GradientMail with 4 bits both ways: nodes that exchange their work through a bucket, on moto's S3 server in memory.

The first node trains and closes the rounds, the second only trains. So nobody takes over a round in the pauses between
two synchronisations, and the commits reach the first node's learner in memory.
"""

from __future__ import annotations

import os
import queue
from argparse import Namespace
from collections.abc import Iterator
from threading import Thread
from typing import Any, Final

from benchmarks.rivals.peers import model
from benchmarks.rivals.peers.dialogue import converse

os.environ.update(AWS_ACCESS_KEY_ID="rivals", AWS_SECRET_ACCESS_KEY="rivals", AWS_DEFAULT_REGION="us-east-1")
os.environ["MOTO_S3_DEFAULT_KEY_BUFFER_SIZE"] = str(2**30)  # objects up to this size stay in memory
_BUCKET: Final = "rivals"
_FRAGMENTS: Final = int(os.environ.get("GM_P", "4"))
_POLL_S: Final = float(os.environ.get("GM_POLL", "0.2"))
_TIMEOUT_S: Final = 120.0


class Learner:
    """A node. Its training loop runs in a thread and takes the steps that it is told to take."""

    def __init__(self, arguments: Namespace) -> None:
        import gradientmail as gm  # type: ignore[import-not-found]
        import torch

        parameters = {
            name.replace(".", "_"): torch.nn.Parameter(torch.from_numpy(array))
            for name, array in model.arrays().items()
        }
        self._module = torch.nn.ParameterDict(parameters)
        extra = eval(os.environ.get("GM_X", "{}"))
        # One more step than fragments: each step publishes a fragment, and the last one waits for what is on its way.
        algorithm = gm.DiLoCo(
            sync_every=_FRAGMENTS + 1,
            fragments=_FRAGMENTS,
            overlap_steps=1,
            quorum_size=arguments.learners,
            delta_dtype="F4",
            commit_dtype="F4", **extra,
        )
        self._session = gm.Session(
            self._module,
            algorithm=algorithm,
            mailbox=gm.S3Mailbox(_BUCKET, "run", endpoint_url=arguments.target),
            role="learner" if arguments.number else "both",
            node_id=f"learner-{arguments.number}",
            poll_interval=_POLL_S,
        )
        self._session.join()
        self._wanted = _FRAGMENTS - 2
        self._due: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._taken: queue.SimpleQueue[None] = queue.SimpleQueue()
        Thread(target=self._session.run, args=(lambda _: 1, self._batches()), daemon=True).start()
        self._taken.get(timeout=_TIMEOUT_S)

    def weights(self) -> list[Any]:
        """Returns the parameters' memory."""
        return [parameter.detach().numpy() for parameter in self._module.values()]

    def prepare(self) -> None:
        """Nothing is needed."""

    def synchronise(self) -> None:
        """Takes steps until every fragment has its next version; the first time, all fragments but one."""
        while self._session.rounds_seen < self._wanted:
            self._due.put(None)
            self._taken.get(timeout=_TIMEOUT_S)
        self._wanted += _FRAGMENTS

    def _batches(self) -> Iterator[None]:
        while True:
            self._taken.put(None)
            yield self._due.get()


def serve(_: Namespace) -> str:
    """Starts the S3 server with an empty bucket, and returns its address."""
    import boto3  # type: ignore[import-not-found]
    from moto.server import ThreadedMotoServer  # type: ignore[import-not-found]

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    globals()["_kept"] = server
    host, port = server.get_host_and_port()
    target = f"http://{host}:{port}"
    boto3.client("s3", endpoint_url=target).create_bucket(Bucket=_BUCKET)
    return target


if __name__ == "__main__":
    converse(serve, Learner)
