"""The chart deploy/helm/skerry, rendered by Helm itself: its objects are valid, and say what compose.yaml says."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import jsonschema
import kubernetes_validate
import pytest
import yaml  # type: ignore[import-untyped]

helm = pytest.importorskip("helm_python", reason="Helm's library has no build for this platform")

_ROOT: Final = Path(__file__).parents[3]
_CHART: Final = _ROOT / "deploy/helm/skerry"
_EXAMPLES: Final = sorted((_ROOT / "deploy/helm/examples").glob("*.yaml"))
_CUSTOM: Final[Mapping[str, Any]] = yaml.safe_load(
    (Path(__file__).parent / "custom_resources.yaml").read_text(encoding="utf-8")
)
_OLDEST, _NEWEST = "1.30.0", "1.37.0"
_STORE: Final = {"syncer": {"store": "s3://bucket/skerry"}}

# What each example consists of.
_OBJECTS: Final = {
    "existing-secrets": """
        Deployment/skerry-console Deployment/skerry-syncer JobSet/skerry-us-1 NetworkPolicy/skerry-console
        NetworkPolicy/skerry-learner NetworkPolicy/skerry-syncer Pod/skerry-test PodDisruptionBudget/skerry-syncer
        Service/skerry-console Service/skerry-syncer ServiceAccount/skerry-syncer""",
    "gateway": """
        Certificate/skerry-console Certificate/skerry-operator Certificate/skerry-syncer Deployment/skerry-syncer
        NetworkPolicy/skerry-syncer Pod/skerry-test PodDisruptionBudget/skerry-syncer Service/skerry-syncer
        ServiceAccount/skerry-syncer TLSRoute/skerry-syncer""",
    "gpu-learner": "JobSet/skerry-us-east NetworkPolicy/skerry-learner",
    "one-cluster": """
        Certificate/skerry-authority Certificate/skerry-console Certificate/skerry-learner-asia-1
        Certificate/skerry-learner-eu-1 Certificate/skerry-learner-us-1 Certificate/skerry-operator
        Certificate/skerry-syncer Deployment/skerry-console Deployment/skerry-syncer Issuer/skerry-authority
        Issuer/skerry-root JobSet/skerry-asia-1 JobSet/skerry-eu-1 JobSet/skerry-us-1 NetworkPolicy/skerry-console
        NetworkPolicy/skerry-learner NetworkPolicy/skerry-syncer Pod/skerry-test PodDisruptionBudget/skerry-syncer
        Service/skerry-console Service/skerry-syncer ServiceAccount/skerry-syncer""",
    "public-syncers": """
        Certificate/skerry-authority Certificate/skerry-console Certificate/skerry-operator Certificate/skerry-syncer
        Deployment/skerry-syncer Issuer/skerry-authority Issuer/skerry-root NetworkPolicy/skerry-syncer Pod/skerry-test
        PodDisruptionBudget/skerry-syncer PrometheusRule/skerry Service/skerry-syncer Service/skerry-syncer-public
        ServiceAccount/skerry-syncer ServiceMonitor/skerry-syncer""",
}


def rendered(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the objects of a release `skerry` in the namespace `train`, by kind and name."""
    with helm.Chart.load(_CHART) as chart:
        chart.validate_schema(dict(values))
        files: dict[str, str] = chart.render(dict(values), name="skerry", namespace="train")
    texts = [text for name, text in files.items() if not name.endswith(".txt")]
    objects = [item for text in texts for item in yaml.safe_load_all(text) if item]
    named = {f"{item['kind']}/{item['metadata']['name']}": item for item in objects}
    assert len(named) == len(objects), "two objects have one name"
    return named


def example(path: Path) -> dict[str, Any]:
    """Returns the values of an example."""
    values: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return values


def pods(objects: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yields each pod's owner, its labels and its spec."""
    for name, item in objects.items():
        match item["kind"]:
            case "Pod":
                yield name, item["metadata"]["labels"], item["spec"]
            case "Deployment":
                yield name, item["spec"]["template"]["metadata"]["labels"], item["spec"]["template"]["spec"]
            case "JobSet":
                template = item["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
                yield name, template["metadata"]["labels"], template["spec"]


def env_of(container: Mapping[str, Any]) -> dict[str, str]:
    """Returns the variables of a container that have a value."""
    return {item["name"]: item["value"] for item in container["env"] if "value" in item}


def check(item: Mapping[str, Any], version: str) -> None:
    """Checks an object strictly: no field is unknown.

    Raises:
        kubernetes_validate.ValidationError: it isn't what Kubernetes' `version` takes.
        jsonschema.ValidationError: it isn't what its own project takes.
    """
    schema = _CUSTOM.get(f"{item['apiVersion']} {item['kind']}")
    if schema is None:
        kubernetes_validate.validate(item, version, strict=True)
        return
    assert set(item) == {"apiVersion", "kind", "metadata", "spec"}
    jsonschema.validate(item["spec"], schema)
    for job in item["spec"].get("replicatedJobs", ()):
        kubernetes_validate.validate(
            {"apiVersion": "batch/v1", "kind": "Job", "metadata": item["metadata"], **job["template"]},
            version,
            strict=True,
        )


def test_helm_finds_nothing_wrong_with_the_chart() -> None:
    report = helm.lint(_CHART, _STORE, strict=True)
    assert [message for message in report["messages"] if message["severity"] > 1] == []
    assert report["errors"] == []


@pytest.mark.parametrize("path", _EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.parametrize("version", [_OLDEST, _NEWEST])
def test_every_object_is_valid_strictly(path: Path, version: str) -> None:
    for item in rendered(example(path)).values():
        check(item, version)


@pytest.mark.parametrize("path", _EXAMPLES, ids=lambda path: path.stem)
def test_an_example_consists_of_what_it_says(path: Path) -> None:
    assert sorted(rendered(example(path))) == _OBJECTS[path.stem].split()


def test_a_field_that_kubernetes_or_its_own_project_does_not_know_is_found() -> None:
    objects = rendered(example(_ROOT / "deploy/helm/examples/one-cluster.yaml"))
    learner = objects["JobSet/skerry-us-1"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    learner["template"]["spec"]["containers"][0]["readOnly"] = True
    with pytest.raises(kubernetes_validate.ValidationError, match="readOnly"):
        check(objects["JobSet/skerry-us-1"], _NEWEST)
    objects["Certificate/skerry-syncer"]["spec"]["uri"] = []
    with pytest.raises(jsonschema.ValidationError, match="uri"):
        check(objects["Certificate/skerry-syncer"], _NEWEST)


@pytest.mark.parametrize("path", _EXAMPLES, ids=lambda path: path.stem)
def test_pods_are_restricted_and_run_as_the_images_user(path: Path) -> None:
    for name, labels, spec in pods(rendered(example(path))):
        assert labels["app.kubernetes.io/instance"] == "skerry", name
        assert spec["automountServiceAccountToken"] is False
        security = spec["securityContext"]
        assert (security["runAsNonRoot"], security["runAsUser"], security["fsGroup"]) == (True, 10001, 10001)
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["limits"]["memory"]
        kinds = {kind for volume in spec["volumes"] for kind in volume if kind != "name"}
        assert "hostPath" not in kinds


def test_the_chart_says_what_compose_says() -> None:
    services = yaml.safe_load((_ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]
    objects = {name: spec for name, _, spec in pods(rendered(example(_ROOT / "deploy/helm/examples/one-cluster.yaml")))}
    pairs = {
        "syncer-1": "Deployment/skerry-syncer",
        "learner-us": "JobSet/skerry-us-1",
        "console": "Deployment/skerry-console",
    }
    for service, name in pairs.items():
        composed, (container,) = services[service], objects[name]["containers"]
        theirs, ours = composed["environment"], env_of(container)
        shared = {"SKERRY_METRICS", "SKERRY_RUN", "SKERRY_LEARNER_ID", "SKERRY_REGION", "SKERRY_CREATE", "SKERRY_SHARD"}
        assert {key: theirs[key] for key in shared & theirs.keys()} == {
            key: ours[key] for key in shared & theirs.keys()
        }
        assert composed["read_only"] == container["securityContext"]["readOnlyRootFilesystem"]
        assert composed["stop_grace_period"] == f"{objects[name]['terminationGracePeriodSeconds']}s"
        memory = composed["mem_limit"].rpartition("-")[2].rstrip("}").replace("g", "Gi").replace("m", "Mi")
        assert container["resources"]["limits"]["memory"] == memory


def test_certificates_name_what_their_bearers_are_and_where_clients_look_for_them() -> None:
    objects = rendered({**_STORE, "tls": {"hostnames": ["syncer.example"]}, "learners": [{"id": "us-1", "run": "gpt"}]})
    specs = {name: item["spec"] for name, item in objects.items() if item["kind"] == "Certificate"}
    assert specs["Certificate/skerry-learner-us-1"]["uris"] == ["skerry://learner/gpt/us-1"]
    assert specs["Certificate/skerry-console"]["uris"] == ["skerry://reader/console"]
    assert specs["Certificate/skerry-operator"]["uris"] == ["skerry://admin/operator"]
    syncer = specs["Certificate/skerry-syncer"]
    # Its probes connect to 127.0.0.1 with the same certificate.
    assert {"127.0.0.1", "skerry-syncer.train.svc", "syncer.example"} <= {*syncer["dnsNames"], *syncer["ipAddresses"]}
    assert {"server auth", "client auth"} <= set(syncer["usages"])
    for _, _, spec in pods(objects):
        (mounted,) = [volume["secret"]["secretName"] for volume in spec["volumes"] if "secret" in volume]
        assert mounted in {item["secretName"] for item in specs.values()}
        target = env_of(spec["containers"][0]).get("SKERRY_TARGET", "skerry-syncer.train.svc:50051")
        assert target.rpartition(":")[0] in syncer["dnsNames"]


def test_a_learner_is_one_jobset_that_restarts_as_a_whole_and_by_itself() -> None:
    item = rendered(example(_ROOT / "deploy/helm/examples/gpu-learner.yaml"))["JobSet/skerry-us-east"]
    (replicated,) = item["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert item["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "spot"
    assert (job["completions"], job["parallelism"], job["completionMode"], job["backoffLimit"]) == (2, 2, "Indexed", 0)
    # A pod that is evicted ends the job, whatever its status, and the restart does not count.
    (rule,) = job["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onPodConditions"]) == ("FailJob", [{"type": "DisruptionTarget", "status": "True"}])
    (rule,) = item["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("RestartJobSetAndIgnoreMaxRestarts", ["PodFailurePolicy"])
    (container,) = job["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    # torchrun meets at the first pod, by the name that the JobSet's own service gives it.
    assert env_of(container)["PET_MASTER_ADDR"] == "skerry-us-east-ranks-0-0.skerry-us-east"
    assert item["spec"]["network"]["subdomain"] == "skerry-us-east"


def test_nobody_but_the_release_reaches_syncers_until_they_are_public() -> None:
    def ingress(values: Mapping[str, Any]) -> Any:
        return rendered({"syncer": {**_STORE["syncer"], **values}})["NetworkPolicy/skerry-syncer"]["spec"]["ingress"][0]

    own = {"podSelector": {"matchLabels": {"app.kubernetes.io/instance": "skerry"}}}
    assert ingress({})["from"] == [own]
    assert "from" not in ingress({"loadBalancer": {"enabled": True}})


def test_the_alert_rules_are_those_of_the_file_and_know_the_syncers_by_their_job() -> None:
    objects = rendered({**_STORE, "monitoring": {"enabled": True}})
    alerts = yaml.safe_load((_ROOT / "docker/alerts.yml").read_text(encoding="utf-8"))
    assert objects["PrometheusRule/skerry"]["spec"] == alerts
    monitor = objects["ServiceMonitor/skerry-syncer"]["spec"]
    assert objects["Service/skerry-syncer"]["metadata"]["labels"][monitor["jobLabel"]] == "skerry"
    assert 'up{job="skerry"}' in alerts["groups"][0]["rules"][0]["expr"]


@pytest.mark.parametrize(
    ("values", "advice"),
    [
        ({}, "syncer.store says where all state is kept"),
        ({"syncer": {"store": "bucket"}}, "does not match pattern"),
        ({"syncer": {"store": "s3://b", "replica": 3}}, "'replica' not allowed"),
        ({"syncer": {"enabled": False}, "learners": [{"id": "us"}]}, "name those of another: learner.target"),
        ({**_STORE, "learners": [{"run": "gpt"}]}, "missing property 'id'"),
        ({**_STORE, "learners": [{"id": "us", "nodes": 2}]}, "give the command of your own program"),
        ({**_STORE, "tls": {"certManager": {"enabled": False}}}, "syncer has no certificate: enable tls.certManager"),
        ({"syncer": {"store": "s3://b", "gateway": {"enabled": True}}}, "syncer.gateway needs tls.hostnames"),
    ],
)
def test_values_that_can_not_work_are_refused_with_what_to_do(values: dict[str, Any], advice: str) -> None:
    with pytest.raises(helm.HelmError) as raised:
        rendered(values)
    assert advice in str(raised.value)


def test_without_tls_every_program_is_told_so_and_the_notes_warn() -> None:
    values = {**_STORE, "tls": {"insecure": True}, "console": {"enabled": True}, "learners": [{"id": "us"}]}
    for name, _, spec in pods(rendered(values)):
        (container,) = spec["containers"]
        told = env_of(container).get("SKERRY_INSECURE") == "true" or "--insecure" in container["args"]
        assert told, name
        assert not [volume for volume in spec["volumes"] if "secret" in volume]
    with helm.Chart.load(_CHART) as chart:
        assert "WARNING: tls.insecure" in chart.render(values, name="skerry")["skerry/templates/NOTES.txt"]


def test_a_package_of_the_chart_holds_the_rules_that_the_tree_links_to(tmp_path: Path) -> None:
    archive = helm.package(_CHART, destination=tmp_path)
    shutil.unpack_archive(archive, tmp_path)
    assert (tmp_path / "skerry/alerts.yml").read_bytes() == (_ROOT / "docker/alerts.yml").read_bytes()


def test_the_chart_has_the_version_of_the_product() -> None:
    project = (_ROOT / "pyproject.toml").read_text(encoding="utf-8")
    described = yaml.safe_load((_CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert f'version = "{described["appVersion"]}"' in project
