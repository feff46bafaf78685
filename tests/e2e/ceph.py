"""Ceph's S3 gateway on one machine: a monitor, one storage daemon that keeps everything in memory, and the gateway.

All of it listens on loopback, in a process namespace of its own: killing one process ends all. It forgets everything.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.e2e.machine import SYSTEM_PATH, Namespace, run, tail, wait_until
from tests.support.ports import free_ports

PACKAGES: Final = {
    "ceph-mon": "ceph-mon",
    "ceph-osd": "ceph-osd",
    "radosgw": "radosgw",
    "radosgw-admin": "radosgw",
    "monmaptool": "ceph-common",
    "ceph-authtool": "ceph-common",
    "ceph": "ceph-common",
}
_DAEMONS: Final = ("client.gateway", "osd.0", "mon.a")

_CONFIG: Final = """\
[global]
fsid = {cluster_id}
mon_host = v1:127.0.0.1:{monitor_port}
mon_initial_members = a
keyring = {folder}/keyring
run_dir = {folder}
admin_socket = {folder}/$name.asok
log_file = {folder}/$name.log
mon_cluster_log_file = {folder}/cluster.log
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
ms_bind_ipv6 = false
osd_pool_default_size = 1
osd_pool_default_pg_num = 4
osd_pool_default_pg_autoscale_mode = off
mon_allow_pool_size_one = true
# A full disk of the machine is no matter to what lives in memory.
mon_data_avail_crit = 0
mon_data = {folder}/mon
osd_data = {folder}/osd
osd_objectstore = memstore
memstore_device_bytes = 4294967296
rgw_data = {folder}/gateway
rgw_frontends = beast endpoint=127.0.0.1:{gateway_port}
"""


@dataclass
class CephGateway:
    """A running gateway: where it is, and the one user that it has."""

    port: int
    access_key: str
    # Made anew for each gateway, and worth nothing outside it.
    secret_key: str = field(repr=False)
    _folder: Path = field(repr=False)
    _namespace: Namespace = field(repr=False)

    @classmethod
    def start(cls) -> CephGateway:
        """Returns a gateway that answers, about 15 s later.

        Raises:
            AssertionError: it doesn't; the message holds the ends of the daemons' logs.
        """
        folder = Path(tempfile.mkdtemp(prefix="skerry-ceph-"))
        for name in ("mon", "osd", "gateway"):
            (folder / name).mkdir()
        monitor_port, gateway_port = free_ports(2)
        cluster_id = str(uuid.uuid4())
        (folder / "ceph.conf").write_text(
            _CONFIG.format(cluster_id=cluster_id, folder=folder, monitor_port=monitor_port, gateway_port=gateway_port),
            encoding="utf-8",
        )
        namespace = Namespace("sleep", "infinity")  # which the daemons join
        gateway = cls(gateway_port, secrets.token_hex(10), secrets.token_hex(20), folder, namespace)
        try:
            gateway._make_keys()
            gateway._start_monitor(cluster_id, monitor_port)
            gateway._start_storage()
            gateway._start_gateway()
        except AssertionError as error:
            tails = gateway.log_tails()
            gateway.stop()
            raise AssertionError(f"{error}\n{tails}") from None
        return gateway

    @property
    def endpoint(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        """Ends every daemon at once, and removes what they wrote."""
        self._namespace.end()
        shutil.rmtree(self._folder)

    def env(self) -> dict[str, str]:
        """What makes an S3 client find the gateway, by the names that such clients agree on."""
        return {
            "AWS_ENDPOINT": self.endpoint,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": "us-east-1",
        }

    def log_tails(self) -> str:
        """Returns the ends of all logs."""
        return "\n".join(tail(self._folder / f"{name}.log", lines=12) for name in _DAEMONS)

    def _make_keys(self) -> None:
        keyring = self._folder / "keyring"
        keyring.touch()
        for name in ("mon.", "client.admin", *_DAEMONS[:2]):
            self._tool(
                "ceph-authtool", keyring, "--gen-key", "-n", name, "--cap", "mon", "allow *", "--cap", "osd", "allow *"
            )

    def _start_monitor(self, cluster_id: str, port: int) -> None:
        monitors = self._folder / "monmap"
        self._tool("monmaptool", "--create", "--fsid", cluster_id, "--addv", "a", f"[v1:127.0.0.1:{port}]", monitors)
        self._tool(
            "ceph-mon", *self._config, "--mkfs", "-i", "a", "--monmap", monitors, "--keyring", self._folder / "keyring"
        )
        self._daemon("mon.a", "ceph-mon", *self._config, "-i", "a", "-f")

    def _start_storage(self) -> None:
        # The monitor knows the daemon by this number only; without it, the daemon waits for ever to be let in.
        storage_id = str(uuid.uuid4())
        self._tool("ceph", *self._config, "--connect-timeout", "30", "osd", "new", storage_id, "0")
        self._tool("ceph-osd", *self._config, "-i", "0", "--mkfs", "--osd-uuid", storage_id)
        self._daemon("osd.0", "ceph-osd", *self._config, "-i", "0", "-f")

    def _start_gateway(self) -> None:
        self._daemon("client.gateway", "radosgw", *self._config, "-n", "client.gateway", "-f")
        wait_until(self._answers, what="Ceph's gateway answers", timeout_s=90)
        self._tool(
            "radosgw-admin", *self._config, "-n", "client.gateway", "user", "create", "--uid", "skerry",
            "--display-name", "skerry", "--access-key", self.access_key, "--secret-key", self.secret_key,
        )  # fmt: skip

    @property
    def _config(self) -> tuple[str, str]:
        return "-c", str(self._folder / "ceph.conf")

    def _tool(self, *words: str | Path) -> None:
        run(words, timeout_s=60)

    def _daemon(self, name: str, *words: str) -> None:
        with (self._folder / f"{name}.out").open("wb") as output:
            subprocess.Popen(
                ["setpriv", "--pdeathsig=KILL", *self._namespace.inside(*words)],
                env={**os.environ, "PATH": SYSTEM_PATH},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.endpoint, timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False
