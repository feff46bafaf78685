"""The server that is attacked, and how the attackers and the honest learner connect to it."""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.support.made_keys import make_keys, tls_of
from tests.support.raw_learner import Stubs, connected

HONEST: Final = "honest"
ATTACKER: Final = "mallory"  # a learner
READER: Final = "rita"  # an attacker too
_HOST: Final = "127.0.0.1"


@dataclass(frozen=True)
class Target:
    """A server; where it has roles, each client has one identity."""

    port: int
    keys: Path | None = None  # the folder of the clients' certificates; None: the server has no roles

    def connected(self, who: str = ATTACKER) -> AbstractAsyncContextManager[Stubs]:
        """Connects, over a connection of its own."""
        return connected(self.port, None if self.keys is None else tls_of(self.keys, who))

    async def open_connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connects as the attacker, to say what no gRPC client says."""
        context = None
        if self.keys is not None:
            context = ssl.create_default_context(cafile=self.keys / "ca.pem")
            context.load_cert_chain(self.keys / f"{ATTACKER}.pem", self.keys / f"{ATTACKER}.key")
            context.set_alpn_protocols(["h2"])
        return await asyncio.open_connection(_HOST, self.port, ssl=context)


Attack = Callable[[Target, Counter[str]], Coroutine[Any, Any, None]]


def roles(folder: Path) -> list[str]:
    """Makes the keys of all clients in the folder, and returns the options of a server that asks for them."""
    make_keys(folder, "--server", _HOST, "--learner", HONEST, "--learner", ATTACKER, "--reader", READER)
    pair = ["--tls-cert", f"{folder / _HOST}.pem", "--tls-key", f"{folder / _HOST}.key"]
    return [*pair, "--tls-client-ca", str(folder / "ca.pem")]
