"""Where a campaign's store is: a small file system of its own, or Ceph's gateway; and how it gets full."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import boto3

from skerry_syncer.store.objects.interface import Objects
from skerry_syncer.store.objects.opening import open_objects
from tests.e2e import ceph
from tests.e2e.ceph import CephGateway
from tests.e2e.machine import need_programs

_SIZE: Final = "1g"
_BUCKET: Final = "skerry-chaos"


@dataclass(eq=False)
class StorePlace:
    """One kind of store, and an empty prefix in it for each deployment."""

    kind: str
    folder: Path | None = None
    mount: Path | None = None  # a file system of its own, whose size can be changed
    gateway: CephGateway | None = None
    _prefix: str = field(default_factory=lambda: secrets.token_hex(4))

    def url(self, name: str) -> str:
        """Returns the URL of one deployment's store."""
        return f"s3://{_BUCKET}/{self._prefix}-{name}" if self.folder is None else f"file://{self.folder / name}"

    def env(self) -> dict[str, str]:
        """Returns what a client's environment says."""
        return {} if self.gateway is None else self.gateway.env()

    def open(self, name: str) -> Objects:
        """Opens one deployment's store past all faults."""
        if self.gateway is None:
            return open_objects(self.url(name))
        env = self.gateway.env()
        options = {
            "endpoint": env["AWS_ENDPOINT"],
            "access_key_id": env["AWS_ACCESS_KEY_ID"],
            "secret_access_key": env["AWS_SECRET_ACCESS_KEY"],
            "region": env["AWS_REGION"],
        }
        return open_objects(self.url(name), options=options)

    def fill(self) -> bool:
        """Leaves no space in the file system; returns whether that is possible here."""
        if self.mount is None:
            return False
        found = os.statvfs(self.mount)
        used_kib = (found.f_blocks - found.f_bfree) * found.f_frsize // 1024
        return _mounted(self.mount, "-o", f"remount,size={used_kib + 16}k")

    def empty(self) -> None:
        """Gives the space back."""
        if self.mount is not None:
            _mounted(self.mount, "-o", f"remount,size={_SIZE}")


@contextlib.contextmanager
def store_place(kind: str, folder: Path, *, may_mount: bool) -> Iterator[StorePlace]:
    """Yields the place, and removes it at the end of the context."""
    if kind == "s3":
        need_programs(ceph.PACKAGES)
        gateway = CephGateway.start()
        try:
            place = StorePlace(kind, gateway=gateway)
            env = gateway.env()
            boto3.client(
                "s3",
                endpoint_url=gateway.endpoint,
                aws_access_key_id=env["AWS_ACCESS_KEY_ID"],
                aws_secret_access_key=env["AWS_SECRET_ACCESS_KEY"],
                region_name=env["AWS_REGION"],
            ).create_bucket(Bucket=_BUCKET)
            yield place
        finally:
            gateway.stop()
        return
    root = folder / "store"
    root.mkdir()
    mount = root if may_mount and _mounted(root, "-t", "tmpfs", "-o", f"size={_SIZE}", "none") else None
    try:
        yield StorePlace(kind, folder=root, mount=mount)
    finally:
        if mount is not None:
            subprocess.run(["umount", "--lazy", str(mount)], check=False, capture_output=True)
        shutil.rmtree(root, ignore_errors=True)


def _mounted(folder: Path, *words: str) -> bool:
    return subprocess.run(["mount", *words, str(folder)], check=False, capture_output=True).returncode == 0
