"""Nodes around a hub: network namespaces joined by links that tc's token bucket limits, and a relay between them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from benchmarks.wan.relay import DEVICE, Relay

# Packets are as large as the kernel allows, so that a relay in Python carries gigabits. Real links have smaller ones.
_MTU: Final = 65_000
_BURST: Final = "512kb"
_QUEUE: Final = "8mb"
_TABLE: Final = 77
_RECEIVE_BUFFER: Final = Path("/proc/sys/net/ipv4/tcp_rmem")
_CONGESTION_CONTROL: Final = Path("/proc/sys/net/ipv4/tcp_congestion_control")


class Network:
    """Made inside `isolation`, whose end removes it."""

    def __init__(self) -> None:
        """Makes the hub, which is where this process runs."""
        self.relay = Relay()
        self._numbers: dict[str, int] = {}
        for name in ("ip_forward", "conf/all/rp_filter", "conf/default/rp_filter"):
            Path(f"/proc/sys/net/ipv4/{name}").write_text("1" if name == "ip_forward" else "0")
        _do(f"ip link set {DEVICE} mtu {_MTU} txqueuelen 10000 up")
        _do(f"ip rule add pref 10 iif {DEVICE} lookup main")
        _do(f"ip route add default dev {DEVICE} table {_TABLE}")
        self.relay.start()

    def add(self, name: str) -> str:
        """Makes a node and returns its address; its link is not limited yet."""
        number = self._numbers[name] = len(self._numbers) + 1
        hub, address = f"10.77.{number}.1", f"10.77.{number}.2"
        _do(f"ip netns add {name}")
        _do(f"ip link add to-{name} mtu {_MTU} type veth peer name wan0 mtu {_MTU} netns {name}")
        _do(f"ip address add {hub}/24 dev to-{name}")
        _do(f"ip link set to-{name} up")
        _do(f"ip rule add pref {20 + number} iif to-{name} lookup {_TABLE}")
        _do(f"ip -n {name} address add {address}/24 dev wan0")
        for device in ("lo", "wan0"):
            _do(f"ip -n {name} link set dev {device} up")
        _do(f"ip -n {name} route add default via {hub}")
        return address

    def limit(self, name: str, bits_per_s: float) -> None:
        """Limits a node's link, each way."""
        bucket = f"root tbf rate {bits_per_s:.0f}bit burst {_BURST} limit {_QUEUE}"
        _do(f"tc qdisc replace dev to-{name} {bucket}")
        _do(f"tc -n {name} qdisc replace dev wan0 {bucket}")

    @contextmanager
    def receive_buffer(self, sizes: str) -> Iterator[None]:
        """Gives all nodes another `net.ipv4.tcp_rmem`: the least, first and largest size of a connection's buffer."""
        for node in self._numbers:
            _do(f"ip netns exec {node} sysctl -qw", f"net.ipv4.tcp_rmem={sizes}")
        yield
        for node in self._numbers:  # the hub's namespace has what theirs had
            _do(f"ip netns exec {node} sysctl -qw", f"net.ipv4.tcp_rmem={_RECEIVE_BUFFER.read_text().strip()}")

    def congestion_control(self) -> str:
        """Returns the algorithm that TCP uses here."""
        return _CONGESTION_CONTROL.read_text().strip()


def _do(command: str, *words: str) -> None:
    """Runs a command, to whose words others may be added that contain spaces.

    Raises:
        RuntimeError: it failed; the message has what it said.
    """
    done = subprocess.run([*command.split(), *words], check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"command failed. command={command}, error={done.stderr.strip()}")
