"""Makes things go wrong with real processes, drawn from a seed, and heals all of it at the end."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from tests.e2e.chaos.deployment import UNTOUCHED, Child, Deployment
from tests.support.tcp_link import Link

_GAP_S: Final = 2.5


class Storm:
    """Every kind of disturbance once, in any order, then any of them; each hits what is drawn, and ends by itself."""

    def __init__(self, on: Deployment, seed: int) -> None:
        self._on = on
        self._source = random.Random(f"{seed}/storm")
        self._endings: dict[object, tuple[asyncio.TimerHandle, Callable[[], object]]] = {}  # by what suffers

    async def run(self, duration_s: float) -> None:
        """Disturbs the deployment; returns after `duration_s`, when all of it has been healed."""
        on, kinds = self._on, self._kinds()
        first = list(kinds)
        self._source.shuffle(first)
        gap_s = min(_GAP_S, duration_s / (len(kinds) + 2))
        end_s = time.monotonic() + duration_s
        while time.monotonic() < end_s:
            name = first.pop() if first else self._source.choice(list(kinds))
            on.say(name)
            on.faults[name] += 1
            kinds[name]()
            await on.tend(gap_s * self._source.uniform(0.5, 1.5))
        self._heal()

    def _kinds(self) -> dict[str, Callable[[], object]]:
        on, source = self._on, self._source
        kinds: dict[str, Callable[[], object]] = {
            "kill a replica": lambda: self._kill([self._replica()]),
            "kill all replicas": lambda: self._kill(on.replicas),
            "drain a replica": lambda: self._kill([self._replica()], signal.SIGTERM),
            "stop a replica": lambda: self._stop(self._replica()),
            "kill a learner": lambda: self._kill([self._learner()]),
            "drain a learner": lambda: self._kill([self._learner()], signal.SIGTERM),
            "stop a learner": lambda: self._stop(self._learner()),
            "replace a learner": lambda: self._replace(self._learner()),
            "cut a link": lambda: self._disturb([source.choice(self._links())], Link.cut),
            "cut a learner's links": lambda: self._disturb(self._links(), Link.cut),
            "make connections half-open": lambda: _each(self._links(), Link.freeze),
            "slow a learner's links": lambda: self._slow(self._links()),
            "drop some packets": lambda: self._drop_packets(source.choice((0.01, 0.1))),
            "drop all packets": lambda: self._drop_packets(1.0),
        }
        if store := on.place.links:
            return kinds | {
                "cut a replica's store": lambda: self._disturb([source.choice(store)], Link.cut),
                "cut the store": lambda: self._disturb(store, Link.cut),
                "break requests to the store": lambda: _each(store, Link.reset),
                "make requests half-open": lambda: self._disturb([source.choice(store)], Link.freeze),
                "slow the store": lambda: self._slow(store),
            }
        return kinds | {"fill the disk": lambda: self._during(on.place, on.place.fill, on.place.empty)}

    def _replica(self) -> Child:
        return self._source.choice(self._on.replicas)

    def _learner(self) -> Child:
        return self._source.choice(self._on.learners[:UNTOUCHED])

    def _links(self) -> list[Link]:
        return self._source.choice(self._on.links[:UNTOUCHED])

    def _kill(self, children: Iterable[Child], number: signal.Signals = signal.SIGKILL) -> None:
        for child in children:
            if child.is_alive and not child.is_stopped:
                self._during(child, partial(child.end, number), child.want)

    def _stop(self, child: Child) -> None:
        self._during(child, partial(child.send, signal.SIGSTOP), child.wake_all)

    def _replace(self, child: Child) -> None:
        if child.is_alive:
            self._stop(child)
            child.start()

    def _disturb(self, links: Iterable[Link], begin: Callable[[Link], None]) -> None:
        for link in links:
            self._during(link, partial(begin, link), link.heal)

    def _slow(self, links: Iterable[Link]) -> None:
        bytes_per_s, delay_s = self._source.choice((1e4, 1e5)), self._source.choice((0.0, 0.15))
        self._disturb(links, lambda link: link.slow_down(bytes_per_s, delay_s))

    def _drop_packets(self, share: float) -> None:
        ports = ",".join(str(link.port) for link in self._links())
        rule = ["INPUT", "-p", "tcp", "-m", "multiport", "--ports", ports]
        rule += ["-m", "statistic", "--mode", "random", "--probability", str(share), "-j", "DROP"]
        self._during(ports, lambda: _iptables("-A", *rule), lambda: _iptables("-D", *rule))

    def _during(self, key: object, begin: Callable[[], object], end: Callable[[], object]) -> None:
        """Begins something now and ends it seconds later; what the same thing suffers already ends first."""
        self._end(key)
        begin()
        # Mostly a few seconds, sometimes longer than a lease, a term or a round.
        for_s = min(25.0, self._source.expovariate(1 / 4))
        self._endings[key] = asyncio.get_running_loop().call_later(for_s, self._end, key), end

    def _end(self, key: object) -> None:
        if (ending := self._endings.pop(key, None)) is not None:
            handle, end = ending
            handle.cancel()
            end()

    def _heal(self) -> None:
        for key in list(self._endings):
            self._end(key)
        for link in (*self._on.place.links, *(link for links in self._on.links for link in links)):
            link.heal()


def _each(links: Iterable[Link], act: Callable[[Link], None]) -> None:
    for link in links:
        act(link)


def _iptables(*words: str) -> None:
    subprocess.run(["iptables", "--wait", *words], check=True, capture_output=True, timeout=10)
