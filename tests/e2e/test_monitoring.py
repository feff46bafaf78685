"""docker/prometheus.yml and docker/grafana/skerry.json by Debian's Prometheus, which scrapes a syncer and a learner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest
import yaml  # type: ignore[import-untyped]

from tests.e2e.composition import COMMAND, SERVICES
from tests.e2e.machine import ROOT, SYSTEM_PATH, need_programs, run, wait_until
from tests.support.ports import free_ports

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

_BOARD: Final = json.loads((ROOT / "docker/grafana/skerry.json").read_text(encoding="utf-8"))
_QUERIES: Final = {
    panel["description"]: panel["targets"][0]["expr"] for panel in _BOARD["panels"] if panel["type"] == "timeseries"
}
# Without a sample until something goes wrong, or a judge reports; and what a learner of two rounds does not know yet.
_SILENT: Final = {
    "skerry_rpc_refusals", "skerry_learner_problem", "skerry_learner_failure", "skerry_learner_causes",
    "skerry_learner_staleness",
}  # fmt: skip


class Prometheus:
    """A running server, asked by promtool."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **words: str) -> Any:
        """Returns the data of an answer of the HTTP interface; None if there is none."""
        try:
            with urllib.request.urlopen(f"{self.url}{path}?{urllib.parse.urlencode(words)}", timeout=10) as answer:
                return json.load(answer)["data"]
        except OSError:
            return None

    def series(self, expression: str) -> list[Any]:
        """Returns what promtool finds for an expression now."""
        words = ["promtool", "query", "instant", "--format=json", self.url, expression]
        found: list[Any] = json.loads(run(words, timeout_s=30))
        return found


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A server with the tree's settings, but for the addresses, which has scraped a syncer and a learner in a run."""
    need_programs({"prometheus": "prometheus", "promtool": "prometheus"})
    folder = tmp_path_factory.mktemp("monitoring")
    port, syncer_port, learner_port = free_ports(3)
    settings = yaml.safe_load((ROOT / "docker/prometheus.yml").read_text(encoding="utf-8"))
    settings["global"] = dict.fromkeys(settings["global"], "1s")
    for job, target in zip(settings["scrape_configs"], (syncer_port, learner_port), strict=True):
        job["static_configs"] = [{"targets": [f"127.0.0.1:{target}"]}]
    (folder / "prometheus.yml").write_text(yaml.dump(settings), encoding="utf-8")
    (folder / "alerts.yml").symlink_to(ROOT / "docker/alerts.yml")
    (target_port,) = free_ports(1)
    address = f"127.0.0.1:{target_port}"
    serve = ("skerry", "serve", "--listen", address, "--store", "memory://", "--metrics", f"127.0.0.1:{syncer_port}")
    learn = (
        "skerry", "learn", "demo", "--target", address, "--model", "nano", "--steps", "1000000", "--inner-steps", "5",
        "--planned-tokens", "1000000000", "--learner-id", "us", "--metrics", f"127.0.0.1:{learner_port}",
        "--work-dir", str(folder / "work"),
    )  # fmt: skip
    watch = (
        "prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    )  # fmt: skip
    commands = {"syncer": serve, "learner": learn, "prometheus": watch}
    path = f"{Path(sys.executable).parent}:{SYSTEM_PATH}"
    with ExitStack() as stack:
        for name, words in commands.items():
            log = stack.enter_context((folder / f"{name}.log").open("wb"))
            process = subprocess.Popen(words, env={**os.environ, "PATH": path}, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
        server = Prometheus(port)
        wait_until(lambda: server.get("/api/v1/rules"), what="Prometheus answers", timeout_s=60)
        yield server


def test_the_settings_are_what_prometheus_takes() -> None:
    need_programs({"promtool": "prometheus"})
    assert "SUCCESS" in run(["promtool", "check", "config", ROOT / "docker/prometheus.yml"], timeout_s=60)


def test_every_query_of_the_board_finds_what_a_live_run_serves(prometheus: Prometheus) -> None:
    seen = set[str]()

    def all_found() -> bool:
        for name, expression in _QUERIES.items():
            if name not in seen:
                own = expression.replace("$run", "demo").replace("$__rate_interval", "10s")
                seen.update([name] if prometheus.series(own) else [])
        return seen >= _QUERIES.keys() - _SILENT

    try:
        wait_until(all_found, what="every query finds something", timeout_s=120)
    except AssertionError as error:
        raise AssertionError(f"{error}; without: {sorted(_QUERIES.keys() - _SILENT - seen)}") from None


def test_every_rule_is_evaluated_without_an_error(prometheus: Prometheus) -> None:
    def rules() -> list[Any]:
        groups = (prometheus.get("/api/v1/rules") or {"groups": []})["groups"]
        return [rule for group in groups for rule in group["rules"]]

    wait_until(lambda: rules() and all(rule["health"] == "ok" for rule in rules()), what="the rules hold", timeout_s=60)
    assert [rule["name"] for rule in rules() if rule["state"] == "firing"] == []


def test_the_profile_adds_prometheus_and_grafana_and_nothing_runs_them_unasked() -> None:
    need_programs({COMMAND: COMMAND})
    command = [COMMAND, "--file", str(ROOT / "compose.yaml"), "--profile", "monitoring", "config"]
    composed = yaml.safe_load(run(command, timeout_s=60))["services"]
    asked_for = {name for name, service in composed.items() if service.get("profiles") == ["monitoring"]}
    assert asked_for == {"prometheus", "grafana"}
    assert composed.keys() - asked_for == {*SERVICES, "keys"}
    mounted = [volume.split(":")[0] for name in asked_for for volume in composed[name]["volumes"]]
    assert all(Path(path).is_file() for path in mounted if path.startswith("/"))
