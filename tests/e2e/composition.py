"""compose.yaml, started as a user would start it, and queried."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.engine import Engine
from tests.e2e.machine import ROOT, CommandError, run

COMMAND = "docker-compose"
PROJECT = "skerry-e2e"
SYNCERS = ("syncer-1", "syncer-2")
SERVICES = (*SYNCERS, "learner-us", "learner-eu", "learner-asia", "console")
LEARNERS = {"learner-us": "us-1", "learner-eu": "eu-1", "learner-asia": "asia-1"}


@dataclass(frozen=True)
class Composition:
    """The services of compose.yaml on one engine, under a project name of the tests' own."""

    engine: Engine
    variables: Mapping[str, str]

    def compose(self, *words: str, timeout_s: float) -> str:
        """Returns what compose printed."""
        command: list[str | Path] = [COMMAND, "--project-name", PROJECT, "--file", ROOT / "compose.yaml", *words]
        return run(command, timeout_s=timeout_s, env={**self.engine.env, **self.variables})

    def container(self, service: str) -> str:
        """Returns the id of a service's container, running or not."""
        labels = (f"com.docker.compose.project={PROJECT}", f"com.docker.compose.service={service}")
        filters = [word for label in labels for word in ("--filter", f"label={label}")]
        (container,) = self.engine.docker("ps", "--all", "--quiet", "--no-trunc", *filters).split()
        return container

    def state(self, service: str) -> dict[str, Any]:
        """Returns the state of a service's container: Running, ExitCode, StartedAt, Health."""
        state: dict[str, Any] = self.engine.inspect(self.container(service))["State"]
        return state

    def health(self, service: str) -> str:
        """Returns `starting`, `healthy` or `unhealthy`."""
        return str(self.state(service)["Health"]["Status"])

    def execute(self, service: str, *words: str, timeout_s: float = 30) -> str:
        """Returns what a program printed that ran inside a service's container."""
        return self.engine.docker("exec", self.container(service), *words, timeout_s=timeout_s)

    def show(self) -> dict[str, Any] | None:
        """Returns the run as `skerry runs show` prints it, or None if there is no run or no syncer."""
        for syncer in SYNCERS:
            try:
                shown: dict[str, Any] = json.loads(self.execute(syncer, "skerry", "runs", "show", "demo", "--json"))
            except CommandError:
                continue
            return shown
        return None

    def versions(self) -> dict[str, int]:
        """Returns the newest version of every fragment; empty if no syncer answers."""
        shown = self.show()
        return {} if shown is None else {item["fragment"]: int(item["version"]) for item in shown["run"]["versions"]}

    def participants(self) -> set[str]:
        """Returns the learners whose deltas the last rounds merged."""
        shown = self.show()
        return (
            set() if shown is None else {item["learner_id"] for item in shown["learners"] if item["is_participating"]}
        )

    def log_tails(self, *, lines: int = 25) -> str:
        """Returns the end of every service's log."""
        try:
            return self.compose("logs", "--no-color", f"--tail={lines}", timeout_s=30)
        except CommandError as error:
            return f"the services' logs can't be read: {error}"
