"""From `helm template` to a merged delta: the pods of the chart's release, run by Docker as they are rendered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.e2e.composition import Composition
from tests.e2e.engine import Engine
from tests.e2e.machine import CommandError, wait_until
from tests.e2e.pods import Pod, Secrets
from tests.support.made_keys import make_keys
from tests.unit.deploy.test_helm_chart import pods, rendered

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

_NETWORK: Final = "skerry-pods"
_IMAGES: Final = {"syncer": "skerry-syncer", "console": "skerry-console", "learner": "skerry-learner:us"}
_VALUES: Final = {
    "syncer": {
        "store": "file:///store/skerry",
        "env": [{"name": "SKERRY_NEW_STORE", "value": "true"}],
        "volumes": [{"name": "store", "persistentVolumeClaim": {"claimName": "store"}}],
        "volumeMounts": [{"name": "store", "mountPath": "/store"}],
    },
    "console": {"enabled": True},
    # Until it is told to stop.
    "learner": {"env": [{"name": "SKERRY_STEPS", "value": "1000000"}, {"name": "SKERRY_MODEL", "value": "nano"}]},
    "learners": [{"id": "us-1", "region": "us", "shard": "1/2"}],
}


class Release:
    """The pods of a release by component, and the Secrets that cert-manager would make for it."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        objects = rendered(_VALUES)
        self.engine = engine
        self.secrets = Secrets(folder / "secrets")
        self.specs = {name: spec for name, _, spec in pods(objects)}
        self._make_secrets(folder / "keys", objects)
        replicas = objects["Deployment/skerry-syncer"]["spec"]["replicas"]
        self.syncers = [Pod(engine, f"pod-syncer-{i}", self.specs["Deployment/skerry-syncer"]) for i in range(replicas)]
        self.console = Pod(engine, "pod-console", self.specs["Deployment/skerry-console"])
        self.learner = Pod(engine, "pod-learner", self.specs["JobSet/skerry-us-1"])
        self.test = Pod(engine, "pod-test", self.specs["Pod/skerry-test"])

    def _make_secrets(self, keys: Path, objects: dict[str, Any]) -> None:
        """Makes each Certificate with the names that it asks for, and nothing else."""
        for name, item in objects.items():
            spec = item["spec"] if item["kind"] == "Certificate" and "isCA" not in item["spec"] else None
            if spec is None:
                continue
            if uris := spec.get("uris"):
                role, _, who = uris[0].removeprefix("skerry://").partition("/")
                make_keys(keys, f"--{role}", who)
                pair = who.replace("/", ".")
            else:
                make_keys(keys, "--server", ",".join(spec["dnsNames"]))
                pair = spec["dnsNames"][0]
            assert (keys / f"{pair}.pem").exists(), name
            self.secrets.add(spec["secretName"], keys=keys, pair=pair)

    def start(self, pod: Pod, *, alias: str = "") -> None:
        component = pod.container["name"] if pod.container["name"] in _IMAGES else "syncer"
        pod.start(_NETWORK, self.secrets, alias=alias, image=_IMAGES[component], claims={"store": "pods-store"})


@pytest.fixture(scope="module")
def release(composition: Composition, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    """Two syncers, a console and a learner, running; the service's name finds the syncers."""
    engine = composition.engine
    release = Release(engine, tmp_path_factory.mktemp("release"))
    engine.docker("network", "create", "--internal", _NETWORK)
    # A claim is the group's of fsGroup.
    owner = ("chown", "10001:10001", "/store")
    volume = ("--volume=pods-store:/store", f"--entrypoint={owner[0]}")
    engine.docker("run", "--rm", "--user=0", *volume, _IMAGES["syncer"], *owner[1:])
    everything = [*release.syncers, release.console, release.learner, release.test]
    try:
        for syncer in release.syncers:
            release.start(syncer, alias="skerry-syncer.train.svc")
        for pod in (release.console, release.learner):
            release.start(pod)
        yield release
    finally:
        for pod in everything:
            try:
                engine.docker("rm", "--force", "--volumes", pod.name)
            except CommandError:
                continue  # it was not started
        engine.docker("network", "rm", _NETWORK)
        engine.docker("volume", "rm", "pods-store")


def test_probes_are_answered(release: Release) -> None:
    for pod, kinds in (
        (release.syncers[0], ("startupProbe", "readinessProbe", "livenessProbe")),
        (release.syncers[1], ("startupProbe", "readinessProbe", "livenessProbe")),
        (release.console, ("readinessProbe", "livenessProbe")),
    ):
        for kind in kinds:
            pod.wait_for(kind)


def test_the_helm_test_passes(release: Release) -> None:
    release.start(release.test)
    wait_until(lambda: not release.test.state()["Running"], what="the test ends", timeout_s=60)
    assert release.test.state()["ExitCode"] == 0, release.test.log()


def test_the_learners_deltas_are_merged(release: Release) -> None:
    def metrics() -> str:
        read = "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:9464/metrics').read().decode())"
        return release.engine.docker("exec", release.syncers[0].name, "python3", "-c", read)

    wait_until(
        lambda: 'skerry_learners{run="demo",state="participating"} 1.0' in metrics(),
        what="deltas are merged",
        timeout_s=180,
    )


def test_a_pod_has_the_user_and_the_file_systems_that_it_asks_for(release: Release) -> None:
    for pod in (*release.syncers, release.console, release.learner):
        assert release.engine.docker("exec", pod.name, "id", "-u").strip() == "10001"
        with pytest.raises(CommandError, match="Read-only file system"):
            release.engine.docker("exec", pod.name, "touch", "/opt/skerry/x")


def test_a_terminated_syncer_drains_while_the_other_serves_and_a_learner_tells_that_it_is_not_done(
    release: Release,
) -> None:
    status, took_s = release.syncers[1].terminate()
    assert status == 0, release.syncers[1].log()
    assert took_s < 25
    assert release.syncers[0].probe("readinessProbe")
    # Else the Job would take it for done, and an evicted learner would never come back.
    status, took_s = release.learner.terminate()
    assert status == 143, release.learner.log()
    assert took_s < 40
