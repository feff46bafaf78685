"""hivemind's averager with 8 bits. Finding a group, which takes it seconds, is not measured."""

from __future__ import annotations

import time
from argparse import Namespace
from typing import Any, Final

from benchmarks.rivals.peers import model
from benchmarks.rivals.peers.dialogue import converse

_TIMEOUT_S: Final = 60.0
_ADDRESS: Final = "/ip4/127.0.0.1/tcp/0"


class Learner:
    """A peer that averages its weights with the others'."""

    def __init__(self, arguments: Namespace) -> None:
        import hivemind  # type: ignore[import-not-found]
        import torch
        from hivemind.compression import Uniform8BitQuantization  # type: ignore[import-not-found]

        dht = hivemind.DHT(host_maddrs=[_ADDRESS], initial_peers=[arguments.target], start=True)
        self._averager = hivemind.DecentralizedAverager(
            [torch.from_numpy(array) for array in model.arrays().values()],
            dht,
            start=True,
            prefix="rivals",
            target_group_size=arguments.learners,
            min_group_size=arguments.learners,
            min_matchmaking_time=3.0,
            request_timeout=1.0,
            compression=Uniform8BitQuantization(),
        )
        self._control: Any = None

    def weights(self) -> list[Any]:
        """Returns the averaged tensors' memory; nothing runs meanwhile."""
        with self._averager.get_tensors() as tensors:
            return [tensor.numpy() for tensor in tensors]

    def prepare(self) -> None:
        """Finds the group."""
        from hivemind.averaging.control import AveragingStage  # type: ignore[import-not-found]

        self._control = self._averager.step(wait=False, require_trigger=True, timeout=_TIMEOUT_S)
        deadline_s = time.monotonic() + _TIMEOUT_S
        while self._control.stage is not AveragingStage.AWAITING_TRIGGER:
            if self._control.done() or time.monotonic() > deadline_s:
                raise RuntimeError(f"hivemind found no group. stage={self._control.stage}")
            time.sleep(0.02)

    def synchronise(self) -> None:
        """Averages."""
        self._control.allow_allreduce()
        if self._control.result(timeout=_TIMEOUT_S) is None:
            raise RuntimeError("hivemind did not average")


def serve(_: Namespace) -> str:
    """Starts a node of the hash table by which peers find each other, and returns its address."""
    import hivemind

    dht = hivemind.DHT(host_maddrs=[_ADDRESS], start=True)
    globals()["_kept"] = dht
    return str(dht.get_visible_maddrs()[0])


if __name__ == "__main__":
    converse(serve, Learner)
