"""Pods of the Helm chart, run by Docker as Kubernetes runs them: user, file systems, variables, probes, SIGTERM."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.e2e.engine import Engine
from tests.e2e.machine import CommandError, run, wait_until

_UNITS: Final = {"Mi": "m", "Gi": "g"}


@dataclass(frozen=True)
class Secrets:
    """The files of Secrets: name to folder, with tls.crt, tls.key and ca.crt."""

    folder: Path

    def add(self, name: str, *, keys: Path, pair: str) -> None:
        """Gives a Secret the certificate `pair` of a folder that `skerry keys` made."""
        target = self.folder / name
        target.mkdir(parents=True)
        for source, file in (("ca.pem", "ca.crt"), (f"{pair}.pem", "tls.crt"), (f"{pair}.key", "tls.key")):
            shutil.copyfile(keys / source, target / file)


@dataclass(frozen=True)
class Pod:
    """A container of a pod's spec, running."""

    engine: Engine
    name: str
    spec: Mapping[str, Any]

    @property
    def container(self) -> Mapping[str, Any]:
        """The only container of the spec."""
        (container,) = self.spec["containers"]
        assert isinstance(container, dict)
        return container

    def start(self, network: str, secrets: Secrets, *, alias: str = "", image: str, claims: Mapping[str, str]) -> None:
        """Starts it; `alias` is the service that finds it, and `claims` gives each claim a volume of Docker's."""
        words = ["run", "--detach", "--name", self.name, "--network", network, *self._security(), *self._memory()]
        if alias:
            words += ["--network-alias", alias]
        for item in self.container["env"]:
            # A field of the pod: the index of the only pod.
            words += ["--env", f"{item['name']}={item.get('value', '0')}"]
        words += [word for mount in self.container["volumeMounts"] for word in self._mount(mount, secrets, claims)]
        if command := self.container.get("command"):
            words += ["--entrypoint", command[0]]
        self.engine.docker(*words, image, *self.container.get("command", ())[1:], *self.container.get("args", ()))

    def _security(self) -> list[str]:
        pod, container = self.spec["securityContext"], self.container["securityContext"]
        words = ["--user", f"{pod['runAsUser']}:{pod['runAsGroup']}", "--group-add", str(pod["fsGroup"])]
        words += [f"--cap-drop={name}" for name in container["capabilities"]["drop"]]
        words += ["--read-only"] * container["readOnlyRootFilesystem"]
        return words + ["--security-opt=no-new-privileges:true"] * (not container["allowPrivilegeEscalation"])

    def _memory(self) -> list[str]:
        limit = self.container["resources"]["limits"]["memory"]
        return ["--memory", limit[:-2] + _UNITS[limit[-2:]]]

    def _mount(self, mount: Mapping[str, Any], secrets: Secrets, claims: Mapping[str, str]) -> list[str]:
        path = mount["mountPath"]
        (volume,) = [volume for volume in self.spec["volumes"] if volume["name"] == mount["name"]]
        group = self.spec["securityContext"]["fsGroup"]
        if "secret" in volume:
            folder = secrets.folder / volume["secret"]["secretName"]
            for file in folder.iterdir():  # root's, and the group's to read, as the kubelet has them
                shutil.chown(file, 0, group)
                file.chmod(volume["secret"]["defaultMode"])
            return ["--volume", f"{folder}:{path}:ro"]
        if claim := volume.get("persistentVolumeClaim"):
            return ["--volume", f"{claims[claim['claimName']]}:{path}"]
        assert "emptyDir" in volume
        # A folder: a tmpfs of Docker's has the mode of what it hides.
        folder = secrets.folder.parent / self.name / mount["name"]
        folder.mkdir(parents=True)
        shutil.chown(folder, 0, group)
        folder.chmod(0o2777)
        return ["--volume", f"{folder}:{path}"]

    def wait_for(self, kind: str, timeout_s: float = 300) -> None:
        """Waits until a probe of the container succeeds, by default as long as the chart lets a pod start.

        Raises:
            AssertionError: it doesn't; the message holds the end of what the container said.
        """
        try:
            wait_until(lambda: self.probe(kind), what=f"{kind} of {self.name}", timeout_s=timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log()}") from None

    def probe(self, kind: str) -> bool:
        """Returns whether a probe of the container succeeds now, within its timeout."""
        probe = self.container[kind]
        if http := probe.get("httpGet"):
            (port,) = [port["containerPort"] for port in self.container["ports"] if port["name"] == http["port"]]
            url = f"http://127.0.0.1:{port}{http['path']}"
            words = ["python3", "-c", f"import urllib.request; urllib.request.urlopen({url!r})"]
        else:
            words = probe["exec"]["command"]
        try:
            self.engine.docker("exec", self.name, *words, timeout_s=probe.get("timeoutSeconds", 1) + 5)
        except CommandError:
            return False
        return True

    def state(self) -> dict[str, Any]:
        """Returns Docker's state of the container: Running, ExitCode."""
        state: dict[str, Any] = self.engine.inspect(self.name)["State"]
        return state

    def log(self) -> str:
        """Returns the end of what the container said."""
        return run(["sh", "-c", f"docker logs --tail=30 {self.name} 2>&1"], timeout_s=30, env=self.engine.env)

    def terminate(self) -> tuple[int, float]:
        """Ends it as the kubelet does, after preStop; returns its status, and the seconds that SIGTERM took."""
        grace_s = self.spec["terminationGracePeriodSeconds"]
        stop = self.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {"seconds": 0})["seconds"]
        time.sleep(stop)
        began_s = time.monotonic()
        self.engine.docker("stop", "--time", str(grace_s - stop), self.name, timeout_s=grace_s + 30)
        return int(self.state()["ExitCode"]), time.monotonic() - began_s
