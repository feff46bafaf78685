"""Docker's engine, started by hand in namespaces of its own.

Its processes, bridges, packet filters and mounts exist only there, so that killing one process ends all of them, and
nothing that the host has is touched. What is left then is a folder, and control groups under one name.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.e2e.machine import CommandError, Namespace, run, tail, wait_until

PACKAGES = {
    "dockerd": "docker.io",
    "docker": "docker.io",
    "containerd": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "ip": "iproute2",
}

# The shell is the first process of the namespace: it reaps what containers' shims leave behind, which dockerd doesn't.
_START = 'ip link set lo up; dockerd "$@" & wait $!'
# overlay2 fails on file systems that are overlays themselves (a container); vfs copies, and works anywhere.
_STORAGE_DRIVERS = ("overlay2", "vfs")


class EngineError(Exception):
    """The engine doesn't start on this machine; the message holds the end of its log."""


class Engine:
    """A running dockerd that keeps images and containers in `data`, and its sockets and log in a folder of its own."""

    def __init__(self, data: Path) -> None:
        self.data = data
        # A socket's path has to be short, wherever the tree lies.
        self.folder = Path(tempfile.mkdtemp(prefix="skerry-"))
        self.socket = f"unix://{self.folder}/docker.sock"
        self._log = self.folder / "dockerd.log"
        self._cgroup = f"skerry-e2e-{os.getpid()}"
        self._namespace: Namespace | None = None

    @property
    def env(self) -> dict[str, str]:
        """What makes any client of Docker talk to this engine, and keep its settings here."""
        return {
            "DOCKER_HOST": self.socket,
            "DOCKER_CONFIG": str(self.folder / "client"),
            "DOCKER_BUILDKIT": "1",
            "COMPOSE_DOCKER_CLI_BUILD": "1",
        }

    def start(self) -> None:
        """Starts dockerd with the first storage driver that works here.

        Raises:
            EngineError: with none of them it answers.
        """
        # What another test run has left would start its containers again. It is removed only now, because that takes
        # minutes on a file system that discards every block at once.
        shutil.rmtree(self.data, ignore_errors=True)
        self.data.mkdir(parents=True)
        failures = []
        for driver in _STORAGE_DRIVERS:
            with self._log.open("wb") as log:
                words = ("--net", "sh", "-c", _START, "sh", *self._options(driver))
                self._namespace = Namespace(*words, output=log)
            try:
                wait_until(self._answers, what="dockerd answers", timeout_s=30)
            except AssertionError as error:
                self._namespace.end()
                failures.append(f"{driver}: {error}\n{tail(self._log, lines=15)}")
            else:
                return
        raise EngineError("\n".join(failures))

    def stop(self) -> None:
        """Ends every process of the engine and its containers, at once; `data` stays until an engine starts there."""
        if self._namespace is not None:
            self._namespace.end()
        shutil.rmtree(self.folder)
        for controller in Path("/sys/fs/cgroup").glob(f"**/{self._cgroup}"):
            for folder, _, _ in os.walk(controller, topdown=False):
                Path(folder).rmdir()

    def docker(self, *words: str | Path, timeout_s: float = 60) -> str:
        """Returns what `docker` printed."""
        return run(["docker", *words], timeout_s=timeout_s, env=self.env)

    def inspect(self, name: str) -> dict[str, Any]:
        """Returns what the engine says of one container, image or network."""
        description: dict[str, Any] = json.loads(self.docker("inspect", name))[0]
        return description

    def kill_process_of(self, container: str) -> None:
        """Kills a container's first process from outside with SIGKILL, as the kernel does when memory is short.

        Unlike `docker kill`, which counts as a person's wish, it leaves the restart policy in force.
        """
        process_id = self.inspect(container)["State"]["Pid"]
        assert self._namespace is not None
        run(self._namespace.inside("kill", "-KILL", str(process_id)), timeout_s=10)

    def _options(self, driver: str) -> Sequence[str]:
        config = self.folder / "daemon.json"
        config.write_text("{}", encoding="utf-8")
        return (
            f"--data-root={self.data}",
            f"--exec-root={self.folder / 'exec'}",
            f"--pidfile={self.folder / 'dockerd.pid'}",
            f"--host={self.socket}",
            # This machine's own /etc/docker/daemon.json is none of our business.
            f"--config-file={config}",
            f"--storage-driver={driver}",
            "--exec-opt=native.cgroupdriver=cgroupfs",
            f"--cgroup-parent=/{self._cgroup}",
            "--log-level=warn",
        )

    def _answers(self) -> bool:
        assert self._namespace is not None
        if self._namespace.process.poll() is not None:
            raise AssertionError(f"dockerd ended. status={self._namespace.process.returncode}")
        try:
            self.docker("version", timeout_s=10)
        except CommandError:
            return False
        return True
