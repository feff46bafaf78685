"""Data-parallel training: gloo averages the gradients of a step, in DistributedDataParallel's buckets of 25 MiB."""

from __future__ import annotations

import os
from argparse import Namespace
from datetime import timedelta
from typing import Any, Final

from benchmarks.rivals.peers import model
from benchmarks.rivals.peers.dialogue import converse

os.environ["GLOO_SOCKET_IFNAME"] = "lo"
_TIMEOUT: Final = timedelta(seconds=60)
_BUCKET: Final = 25 * 2**20 // 4


class Learner:
    """One rank. What it averages stands for the gradients."""

    def __init__(self, arguments: Namespace) -> None:
        import torch
        from torch import distributed

        host, _, port = arguments.target.partition(":")
        store = distributed.TCPStore(  # type: ignore[attr-defined]
            host, int(port), is_master=False, timeout=_TIMEOUT
        )
        distributed.init_process_group("gloo", store=store, rank=arguments.number, world_size=arguments.learners)
        arrays = model.arrays()
        self._flat = torch.cat([torch.from_numpy(array).reshape(-1) for array in arrays.values()])
        self._world_size = arguments.learners

    def weights(self) -> list[Any]:
        """Returns the memory of all buckets."""
        return [self._flat.numpy()]

    def prepare(self) -> None:
        """Nothing is needed."""

    def synchronise(self) -> None:
        """Averages every bucket."""
        from torch import distributed

        buckets = self._flat.split(_BUCKET)  # type: ignore[no-untyped-call]
        works = [distributed.all_reduce(bucket, async_op=True) for bucket in buckets]
        for work in works:
            work.wait(_TIMEOUT)
        self._flat /= self._world_size


def serve(_: Namespace) -> str:
    """Starts the store by which ranks find each other, and returns its address."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    globals()["_kept"] = store
    return f"127.0.0.1:{store.port}"


if __name__ == "__main__":
    converse(serve, Learner)
