"""Where a campaign's store is: in a file system of its own that can be full, or behind links to a server of buckets."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import boto3

from tests.e2e.azurite import Azurite
from tests.e2e.ceph import CephGateway
from tests.e2e.machine import wait_until
from tests.simulation.disturbances import REPLICA_COUNT
from tests.support.ports import free_ports
from tests.support.tcp_link import Link

_SIZE: Final = "1g"
_BUCKET: Final = "skerry-chaos"
KINDS: Final = ("file", "s3", "gs", "az")


@dataclass(eq=False)
class StorePlace:
    """An empty store."""

    url: str
    folder: Path | None = None  # a mount, of a file store
    links: tuple[Link, ...] = ()  # of each replica to the server of a bucket
    env_of: Callable[[int], dict[str, str]] = lambda _: {}  # what leads a client to a port of loopback

    def env(self, replica: int) -> dict[str, str]:
        """Returns by which way a replica reaches the store."""
        return self.env_of(self.links[replica].port) if self.links else {}

    def fill(self) -> None:
        """Leaves no space in the file system."""
        assert self.folder is not None
        status = os.statvfs(self.folder)
        used_kib = (status.f_blocks - status.f_bfree) * status.f_frsize // 1024
        _mount(self.folder, "-o", f"remount,size={used_kib + 16}k")

    def empty(self) -> None:
        """Gives the space back."""
        assert self.folder is not None
        _mount(self.folder, "-o", f"remount,size={_SIZE}")


@contextlib.asynccontextmanager
async def store_place(kind: str, folder: Path) -> AsyncIterator[StorePlace]:
    """Yields the place; a server ends with the context, and the mount with the process."""
    if kind == "file":
        root = folder / "store"
        root.mkdir()
        _mount(root, "-t", "tmpfs", "-o", f"size={_SIZE}", "none")
        yield StorePlace(root.as_uri(), folder=root)
        return
    with {"s3": _ceph, "gs": _google, "az": _azurite}[kind](folder) as (port, env_of):
        links = tuple(Link(port) for _ in range(REPLICA_COUNT))
        try:
            os.environ.update(env_of(port))  # for all that this process starts and opens
            for link in links:
                await link.open(0)
            yield StorePlace(f"{kind}://{_BUCKET}/store", links=links, env_of=env_of)
        finally:
            for link in links:
                await link.close()


# Each yields the port of a server with a bucket, and what leads a client to a port.
_Server = tuple[int, Callable[[int], dict[str, str]]]


@contextlib.contextmanager
def _ceph(_: Path) -> Iterator[_Server]:
    gateway = CephGateway.start()
    try:
        os.environ.update(gateway.env())
        boto3.client("s3").create_bucket(Bucket=_BUCKET)
        yield gateway.port, lambda port: dict.fromkeys(("AWS_ENDPOINT", "AWS_ENDPOINT_URL"), f"http://127.0.0.1:{port}")
    finally:
        gateway.stop()


@contextlib.contextmanager
def _google(folder: Path) -> Iterator[_Server]:
    """Google's API, kept by Ceph. A token is renewed 10 s after it was given out."""
    (port,) = free_ports(1)
    with _ceph(folder) as (ceph_port, _), (folder / "google.log").open("wb") as log:
        words = ("-m", "tests.support.google_storage", str(port), f"http://127.0.0.1:{ceph_port}", "250")
        server = subprocess.Popen(["setpriv", "--pdeathsig=KILL", sys.executable, "-B", *words], stdout=log, stderr=log)
        os.environ.pop("GOOGLE_BEARER_TOKEN", None)
        try:
            wait_until(lambda: _listens(port), what="Google's API answers", timeout_s=30)
            yield (
                port,
                lambda way: {"GOOGLE_BASE_URL": f"http://127.0.0.1:{way}", "GCE_METADATA_HOST": f"127.0.0.1:{way}"},
            )
        finally:
            server.kill()
            server.wait()


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _azurite(folder: Path) -> Iterator[_Server]:
    azurite = Azurite.start(folder)
    try:
        azurite.create_container(_BUCKET)
        yield azurite.port, azurite.env
    finally:
        azurite.stop()


def _mount(folder: Path, *words: str) -> None:
    subprocess.run(["mount", *words, str(folder)], check=True, capture_output=True)
