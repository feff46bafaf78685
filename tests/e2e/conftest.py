"""Engines and servers of Debian's packages, one of each for all tests, and their logs where a test fails."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import ceph, engine, images
from tests.e2e.ceph import CephGateway
from tests.e2e.composition import COMMAND, Composition
from tests.e2e.engine import Engine, EngineError
from tests.e2e.fresh import built, built_with_torch
from tests.e2e.machine import BUILD, CommandError, need_programs, need_root, tail

__all__ = ["built", "built_with_torch"]

# Until told to stop; the model and H of compose.yaml itself.
_SETTINGS = {"SKERRY_STEPS": "1000000", "SKERRY_PORT": "0", "SKERRY_PORT_2": "0", "SKERRY_CONSOLE_PORT": "0"}


@pytest.fixture(scope="session")
def docker_engine() -> Iterator[Engine]:
    """Docker's engine, started by hand."""
    need_root()
    need_programs(engine.PACKAGES)
    docker = Engine(BUILD / "engine")
    try:
        docker.start()
        yield docker
    except EngineError as error:
        pytest.skip(f"Docker's engine doesn't run on this machine: {error}")
    finally:
        docker.stop()


@pytest.fixture(scope="session")
def composition(docker_engine: Engine) -> Composition:
    """compose.yaml with its images built."""
    need_programs({COMMAND: COMMAND})
    images.provide_base(docker_engine)
    services = Composition(docker_engine, {**images.provide_wheels(docker_engine), **_SETTINGS})
    services.compose("build", timeout_s=400)
    return services


@pytest.fixture(scope="module")
def services(composition: Composition) -> Iterator[Composition]:
    """The services of compose.yaml, running."""
    try:
        composition.compose("up", "--detach", timeout_s=180)
        yield composition
    except CommandError as error:
        raise AssertionError(f"{error}\n{composition.log_tails()}") from None
    finally:
        composition.compose("down", "--volumes", "--timeout=5", timeout_s=120)


@pytest.fixture(scope="session")
def ceph_gateway() -> Iterator[CephGateway]:
    """Ceph's S3 gateway, which is also the S3 server of every test that asks the environment for one."""
    need_root()
    need_programs(ceph.PACKAGES)
    gateway = CephGateway.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in _named_for_tests(gateway).items():
                patch.setenv(name, value)
            yield gateway
    finally:
        gateway.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds to a failed test's report what the servers that it used were saying."""
    report = yield
    if report.failed and report.when == "call":
        for name, fixture in getattr(item, "funcargs", {}).items():
            if isinstance(fixture, Composition | CephGateway):
                report.sections.append((f"logs of {name}", fixture.log_tails()))
            elif isinstance(fixture, Path):
                report.sections += [(f"logs of {name}", tail(log)) for log in sorted(fixture.glob("*.log"))]
    return report


def _named_for_tests(gateway: CephGateway) -> Mapping[str, Any]:
    return {
        "SKERRY_TEST_S3_ENDPOINT": gateway.endpoint,
        "SKERRY_TEST_S3_ACCESS_KEY": gateway.access_key,
        "SKERRY_TEST_S3_SECRET_KEY": gateway.secret_key,
    }
