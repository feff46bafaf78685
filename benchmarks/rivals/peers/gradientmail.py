"""GradientMail with 4 bits both ways: nodes that exchange their work through a bucket of moto's S3 server.

The first node trains and closes the rounds, and the second one only trains. With two nodes of the default role, the
second would take over a round in each pause between two synchronisations, and both would do the same work.
"""

from __future__ import annotations

import logging
import os
import queue
from argparse import Namespace
from collections.abc import Iterator
from threading import Thread
from typing import Any, Final

from benchmarks.rivals.peers import model
from benchmarks.rivals.peers.dialogue import converse

os.environ.update(AWS_ACCESS_KEY_ID="rivals", AWS_SECRET_ACCESS_KEY="rivals", AWS_DEFAULT_REGION="us-east-1")
os.environ["MOTO_S3_DEFAULT_KEY_BUFFER_SIZE"] = str(2**30)  # smaller objects stay in memory
_BUCKET: Final = "rivals"
# The embedding is a quarter of the model and tensors are not divided, so more fragments would not be of equal size.
_FRAGMENTS: Final = 4
_POLL_S: Final = 0.2  # shorter intervals take processor time from the synchronisation and gain nothing
_TIMEOUT_S: Final = 120.0


class Learner:
    """A node whose training loop runs in a thread and takes a step when it is told to."""

    def __init__(self, arguments: Namespace) -> None:
        import gradientmail  # type: ignore[import-not-found]
        import torch

        parameters = {
            name.replace(".", "_"): torch.nn.Parameter(torch.from_numpy(array))
            for name, array in model.arrays().items()
        }
        self._module = torch.nn.ParameterDict(parameters)
        self._session = gradientmail.Session(
            self._module,
            # Each step publishes a fragment and waits for the one before; the step after the last fragment only waits.
            algorithm=gradientmail.DiLoCo(
                sync_every=_FRAGMENTS + 1,
                fragments=_FRAGMENTS,
                overlap_steps=1,
                quorum_size=arguments.learners,
                delta_dtype="F4",
                commit_dtype="F4",
            ),
            mailbox=gradientmail.S3Mailbox(_BUCKET, "run", endpoint_url=arguments.target),
            role="learner" if arguments.number else "both",
            node_id=f"learner-{arguments.number}",
            poll_interval=_POLL_S,
        )
        self._session.join()
        self._last_round = _FRAGMENTS - 2
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
        """Takes steps until each fragment has its next version. The first time it leaves one fragment out.

        The schedule waits a step longer before the last fragment of a cycle than before the others. A synchronisation
        that begins with that one can end without publishing anything of the next.
        """
        while self._session.rounds_seen < self._last_round:
            self._due.put(None)
            self._taken.get(timeout=_TIMEOUT_S)
        self._last_round += _FRAGMENTS

    def _batches(self) -> Iterator[None]:
        while True:
            self._taken.put(None)  # asking for a batch means that the step before it is over
            yield self._due.get()


def serve(_: Namespace) -> str:
    """Starts the S3 server with an empty bucket, and returns its address."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    globals()["_kept"] = server
    host, port = server.get_host_and_port()
    target = f"http://{host}:{port}"
    boto3.client("s3", endpoint_url=target).create_bucket(Bucket=_BUCKET)
    return target


if __name__ == "__main__":
    converse(serve, Learner)
