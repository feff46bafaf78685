"""Where a campaign's store is: in a file system of its own that can be full, or behind links to a gateway."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import boto3

from tests.e2e.ceph import CephGateway
from tests.simulation.disturbances import REPLICA_COUNT
from tests.support.tcp_link import Link

_SIZE: Final = "1g"
_BUCKET: Final = "skerry-chaos"


@dataclass(eq=False)
class StorePlace:
    """An empty store."""

    url: str
    folder: Path | None = None  # a mount, of a file store
    links: tuple[Link, ...] = ()  # of each replica to the gateway, of an S3 store

    def env(self, replica: int) -> dict[str, str]:
        """Returns by which way a replica reaches the store."""
        if not self.links:
            return {}
        return dict.fromkeys(("AWS_ENDPOINT", "AWS_ENDPOINT_URL"), f"http://127.0.0.1:{self.links[replica].port}")

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
    """Yields the place; the gateway ends with the context, and the mount with the process."""
    if kind == "file":
        root = folder / "store"
        root.mkdir()
        _mount(root, "-t", "tmpfs", "-o", f"size={_SIZE}", "none")
        yield StorePlace(root.as_uri(), folder=root)
        return
    gateway = CephGateway.start()
    links = tuple(Link(gateway.port) for _ in range(REPLICA_COUNT))
    try:
        os.environ.update(gateway.env())  # for all that this process starts and opens
        boto3.client("s3").create_bucket(Bucket=_BUCKET)
        for link in links:
            await link.open(0)
        yield StorePlace(f"s3://{_BUCKET}/store", links=links)
    finally:
        for link in links:
            await link.close()
        gateway.stop()


def _mount(folder: Path, *words: str) -> None:
    subprocess.run(["mount", *words, str(folder)], check=True, capture_output=True)
