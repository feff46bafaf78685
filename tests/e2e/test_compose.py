"""`docker compose up`: three regions train one model through kills, until they are stopped."""

from __future__ import annotations

import time

import pytest

from tests.e2e.composition import LEARNERS, SERVICES, SYNCERS, Composition
from tests.e2e.machine import CommandError, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

_CONNECT = """\
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=2).close()
except OSError as error:
    sys.exit(f"refused: {error}")
"""


def wait_for_progress(services: Composition, *, beyond: dict[str, int], count: int, timeout_s: float = 120) -> None:
    """Waits until every fragment is `count` versions past where it was."""

    def has_progressed() -> bool:
        versions = services.versions()
        return bool(versions) and all(
            version >= beyond.get(fragment, 0) + count for fragment, version in versions.items()
        )

    # Each look starts a Python in a container, and the learners need the cores.
    wait_until(has_progressed, what=f"{count} more versions of every fragment", timeout_s=timeout_s, every_s=3)


def test_three_regions_train_one_model(services: Composition) -> None:
    wait_for_progress(services, beyond={}, count=2)
    everybody = set(LEARNERS.values())
    wait_until(lambda: services.participants() == everybody, what="deltas of all three merged", timeout_s=120)


def test_the_console_shows_the_run_and_its_learners(services: Composition) -> None:
    wait_until(lambda: services.health("console") == "healthy", what="the console is healthy", timeout_s=60)
    asking = "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:8080/runs/demo').read().decode())"
    page = services.execute("console", "python3", "-c", asking)
    assert all(name in page for name in LEARNERS.values())


def test_nobody_is_served_without_a_certificate_of_the_authority(services: Composition) -> None:
    assert services.state("keys")["ExitCode"] == 0
    without = ("--unset=SKERRY_TLS_CERT", "--unset=SKERRY_TLS_KEY")
    with pytest.raises(CommandError, match="TLS_FAILED"):
        services.execute("syncer-1", "env", *without, "skerry", "runs", "list")
    with pytest.raises(CommandError, match="If it uses TLS"):
        services.execute("syncer-1", "env", *without, "--unset=SKERRY_TLS_CA", "skerry", "runs", "list")


def test_each_service_has_its_own_keys_and_none_has_the_authoritys(services: Composition) -> None:
    for learner, name in LEARNERS.items():
        files = services.execute(learner, "ls", "/etc/skerry").split()
        assert sorted(files) == ["ca.pem", f"demo.{name}.key", f"demo.{name}.pem"]
    files = services.execute(SYNCERS[0], "ls", "/etc/skerry").split()
    assert sorted(files) == ["ca.pem", "operator.key", "operator.pem", "syncer-1.key", "syncer-1.pem"]


def test_a_region_reaches_the_syncers_and_no_other_region(services: Composition) -> None:
    for syncer in SYNCERS:
        services.execute("learner-us", "python3", "-c", _CONNECT, syncer, "50051")
    networks = services.engine.inspect(services.container("learner-eu"))["NetworkSettings"]["Networks"]
    (address,) = [network["IPAddress"] for network in networks.values()]
    with pytest.raises(CommandError, match=r"refused: .*unreachable|refused: timed out"):
        services.execute("learner-us", "python3", "-c", _CONNECT, address, "50051")
    with pytest.raises(CommandError, match="refused"):
        services.execute("learner-us", "python3", "-c", _CONNECT, "learner-eu", "50051")


def test_the_others_train_on_without_a_killed_learner_and_it_comes_back(services: Composition) -> None:
    services.engine.docker("kill", "--signal=KILL", services.container("learner-eu"))
    wait_for_progress(services, beyond=services.versions(), count=3)
    assert not services.state("learner-eu")["Running"], "compose does not restart a container that `docker kill` ended"
    assert LEARNERS["learner-eu"] not in services.participants()
    services.compose("up", "--detach", timeout_s=120)
    wait_until(lambda: LEARNERS["learner-eu"] in services.participants(), what="the learner contributes", timeout_s=120)


def test_a_killed_syncer_is_restarted_and_nothing_that_it_had_committed_is_lost(services: Composition) -> None:
    syncer = SYNCERS[0]
    before, started_at = services.versions(), services.state(syncer)["StartedAt"]
    services.engine.kill_process_of(services.container(syncer))
    wait_until(lambda: services.state(syncer)["StartedAt"] != started_at, what="a restart", timeout_s=30)
    wait_until(lambda: services.health(syncer) == "healthy", what="the syncer is healthy", timeout_s=60)
    after = services.versions()
    assert {fragment: after[fragment] >= version for fragment, version in before.items()} == dict.fromkeys(before, True)
    wait_for_progress(services, beyond=after, count=2)
    assert all(services.state(learner)["Running"] for learner in LEARNERS), "learners outlive their syncer"


def test_the_others_train_on_while_a_syncer_is_stopped(services: Composition) -> None:
    syncer = SYNCERS[1]
    services.compose("stop", syncer, timeout_s=90)
    try:
        wait_for_progress(services, beyond=services.versions(), count=2)
    finally:
        services.compose("start", syncer, timeout_s=90)
    wait_until(lambda: services.health(syncer) == "healthy", what="the syncer is healthy", timeout_s=60)


def test_everything_drains_when_it_is_stopped_and_the_store_holds_what_it_says(services: Composition) -> None:
    before = time.monotonic()
    services.compose("stop", timeout_s=240)
    took_s = time.monotonic() - before
    statuses = {service: services.state(service)["ExitCode"] for service in SERVICES}
    assert statuses == {service: 143 if service in LEARNERS else 0 for service in SERVICES}
    assert took_s < 60, "learners stop before the syncer, and each within its grace"
    volumes = f"--volumes-from={services.container(SYNCERS[0])}"
    services.engine.docker("run", "--rm", "--network=none", volumes, "skerry-syncer", "verify", "demo", timeout_s=120)
