"""What a fork of the process means: the child is not the learner, and gRPC must not touch it.

A forked child, such as a worker of a DataLoader, has a copy of the memory but none of the threads, and shares the
connections of its parent.

gRPC's own handlers of fork() restart its threads in the child, on file descriptors that the child shares with its
parent, which kills either of them (grpc#32758, grpc#43055). Importing this module turns the handlers off, unless
GRPC_ENABLE_FORK_SUPPORT is set or gRPC was imported earlier: gRPC reads the variable when it is imported.
"""

from __future__ import annotations

import os
import sys

from skerry.errors import error_of
from skerry.runtime.logs import get_logger

_log = get_logger(__name__)

if "grpc" in sys.modules and "GRPC_ENABLE_FORK_SUPPORT" not in os.environ:  # noqa: TID251 - gRPC reads it nowhere else
    _log.warning(
        "gRPC was imported before skerry, so its handlers of fork() may crash the workers of a DataLoader. Import "
        "skerry first, or set GRPC_ENABLE_FORK_SUPPORT=0"
    )
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # noqa: TID251 - gRPC reads it nowhere else
# What gRPC documents as its default. Without it every connection that ends and every handshake is a line of its own on
# standard error, beside the error that says what to do.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # noqa: TID251 - gRPC reads it nowhere else


class OwnProcess:
    """The process in which this object was made; what goes with threads or connections belongs to it alone."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_forked(self) -> bool:
        """Whether this code runs in a forked child of that process."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Checks that this code runs in that process and not in a forked child.

        Raises:
            StopExchangingError: FORKED.
        """
        if self.is_forked:
            raise error_of(
                "FORKED",
                "this process was forked from one that is connected to a syncer, and can't use or make connections. "
                "Train and call in that process, or have multiprocessing start this one by 'spawn'. "
                f"process={os.getpid()}, forked_from={self._pid}",
            )
