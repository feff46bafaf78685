"""The relay through which all packets between nodes pass: it delays them.

It is a TUN device that the kernel routes packets into and takes them back from, so TCP, with its windows and
retransmissions, runs from end to end.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from collections import deque
from typing import Final

DEVICE: Final = "relay"
_TUNSETIFF: Final = 0x400454CA
_TUN_WITHOUT_HEADER: Final = 0x0001 | 0x1000
_LONGEST: Final = 1 << 17


class Relay:
    """Begins when it is started; `round_trip_s` may be changed at any time."""

    def __init__(self) -> None:
        self.round_trip_s = 0.0
        self._fd = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(self._fd, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _TUN_WITHOUT_HEADER))
        self._packets: deque[tuple[float, bytes]] = deque()
        self._has_packets = threading.Event()

    def start(self) -> None:
        """Begins to carry packets; the device must be up."""
        for work in (self._take, self._give):
            threading.Thread(target=work, daemon=True).start()

    def _take(self) -> None:
        due_s = 0.0
        while True:
            packet = os.read(self._fd, _LONGEST)
            if packet[0] >> 4 == 4:
                due_s = max(due_s, time.monotonic() + self.round_trip_s / 2)
                self._packets.append((due_s, packet))
                self._has_packets.set()

    def _give(self) -> None:
        while True:
            self._has_packets.wait()
            self._has_packets.clear()
            while self._packets:
                due_s, packet = self._packets[0]
                if (wait_s := due_s - time.monotonic()) > 0:
                    time.sleep(wait_s)
                self._packets.popleft()
                os.write(self._fd, packet)
