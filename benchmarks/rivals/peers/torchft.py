"""torchft's DiLoCo over gloo: a lighthouse, and replicas that average pseudogradients every step."""

from __future__ import annotations

import os
import time
from argparse import Namespace
from datetime import timedelta
from typing import Any, Final

from benchmarks.rivals.peers import model
from benchmarks.rivals.peers.dialogue import converse

os.environ["GLOO_SOCKET_IFNAME"] = "lo"
_TIMEOUT: Final = timedelta(seconds=60)


class Learner:
    """A replica group of one process."""

    def __init__(self, arguments: Namespace) -> None:
        import torch
        from torch.distributed import TCPStore  # type: ignore[attr-defined]
        from torchft import Manager, ProcessGroupGloo  # type: ignore[import-not-found]
        from torchft.local_sgd import DiLoCo  # type: ignore[import-not-found]

        parameters = {
            name.replace(".", "_"): torch.nn.Parameter(torch.from_numpy(array))
            for name, array in model.arrays().items()
        }
        self._module = torch.nn.ParameterDict(parameters)
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=_TIMEOUT),
            load_state_dict=self._module.load_state_dict,
            state_dict=self._module.state_dict,
            min_replica_size=arguments.learners,
            use_async_quorum=False,
            timeout=_TIMEOUT,
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=self._store.port,
            lighthouse_addr=arguments.target,
            replica_id=f"learner-{arguments.number}",
            hostname="127.0.0.1",
        )
        self._inner = torch.optim.SGD(self._module.parameters(), lr=1e-9)
        outer = torch.optim.SGD(self._module.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        self._diloco = DiLoCo(self._manager, [self._module], self._inner, outer, sync_every=1)
        self._diloco.__enter__()

    def weights(self) -> list[Any]:
        """Returns the parameters' memory."""
        return [parameter.detach().numpy() for parameter in self._module.values()]

    def prepare(self) -> None:
        """Nothing is needed."""

    def synchronise(self) -> None:
        """Takes an inner step without gradients, after which DiLoCo synchronises."""
        step = self._manager.current_step()
        deadline_s = time.monotonic() + _TIMEOUT.total_seconds()
        self._inner.step()
        if self._manager.current_step() == step or time.monotonic() > deadline_s:
            raise RuntimeError("torchft did not commit the step")


def serve(_: Namespace) -> str:
    """Starts a lighthouse, and returns its address."""
    from torchft.coordination import LighthouseServer  # type: ignore[import-not-found]

    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=1000)
    globals()["_kept"] = server
    return str(server.address())


if __name__ == "__main__":
    converse(serve, Learner)
