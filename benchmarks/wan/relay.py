"""The relay through which all packets between nodes pass: it delays them, and stalls or cuts a node's link.

It is a TUN device that the kernel routes packets into and takes them back from, so TCP, with its windows and
retransmissions, runs from end to end.
"""

from __future__ import annotations

import fcntl
import os
import random
import struct
import threading
import time
from collections import deque
from typing import Final

DEVICE: Final = "relay"
_TUNSETIFF: Final = 0x400454CA
_TUN_WITHOUT_HEADER: Final = 0x0001 | 0x1000
_LONGEST: Final = 1 << 17
# Third byte of the source and the destination address in an IPv4 header: the number of the node.
_SOURCE: Final = 14
_DESTINATION: Final = 18


class Relay:
    """Begins when it is made; `round_trip_s`, `jitter_s` and the sets may be changed at any time."""

    def __init__(self) -> None:
        self.round_trip_s = 0.0
        self.jitter_s = 0.0  # at most so much is added each way; packets keep their order
        self.stalled: set[int] = set()  # nodes whose packets wait
        self.cut: set[int] = set()  # nodes whose packets are lost
        self._fd = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(self._fd, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _TUN_WITHOUT_HEADER))
        self._packets: deque[tuple[float, bytes]] = deque()
        self._held: deque[bytes] = deque()
        self._has_packets = threading.Event()
        self._draws = random.Random(0)

    def start(self) -> None:
        """Begins to carry packets; the device must be up."""
        for work in (self._take, self._give):
            threading.Thread(target=work, daemon=True).start()

    def _take(self) -> None:
        due_s = 0.0
        while True:
            packet = os.read(self._fd, _LONGEST)
            if packet[0] >> 4 != 4 or self._touches(packet, self.cut):
                continue
            delay_s = self.round_trip_s / 2 + (self._draws.uniform(0, self.jitter_s) if self.jitter_s else 0.0)
            due_s = max(due_s, time.monotonic() + delay_s)
            self._packets.append((due_s, packet))
            self._has_packets.set()

    def _give(self) -> None:
        while True:
            self._has_packets.wait(0.1)
            self._has_packets.clear()
            while self._packets:
                due_s, packet = self._packets[0]
                if (wait_s := due_s - time.monotonic()) > 0:
                    time.sleep(wait_s)
                self._packets.popleft()
                self._pass_on(packet)
            held, self._held = self._held, deque()
            for packet in held:
                self._pass_on(packet)

    def _pass_on(self, packet: bytes) -> None:
        if self._touches(packet, self.stalled):
            self._held.append(packet)
        else:
            os.write(self._fd, packet)

    @staticmethod
    def _touches(packet: bytes, nodes: set[int]) -> bool:
        return bool(nodes) and (packet[_SOURCE] in nodes or packet[_DESTINATION] in nodes)
