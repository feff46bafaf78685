"""The TCP links between learners and replicas."""

from __future__ import annotations

from collections.abc import Iterable

from tests.support.tcp_link import Link


class Relay:
    """The links of all learners to all replicas."""

    def __init__(self, learner_count: int, replica_ports: Iterable[int]) -> None:
        self.links = [[Link(port) for port in replica_ports] for _ in range(learner_count)]

    async def open(self, ports: Iterable[int]) -> None:
        """Listens on one port a link."""
        rest = iter(ports)
        for links in self.links:
            for link in links:
                await link.open(next(rest))

    async def close(self) -> None:
        """Stops everything."""
        for link in self.of(None, None):
            await link.close()

    def of(self, learner: int | None, replica: int | None) -> list[Link]:
        """Returns the links between a learner and a replica; None means all of them."""
        found = self.links if learner is None else [self.links[learner]]
        return [link for links in found for link in (links if replica is None else [links[replica]])]

    def target(self, learner: int) -> str:
        """Returns what the learner is told to connect to."""
        return ",".join(f"127.0.0.1:{link.port}" for link in self.links[learner])
