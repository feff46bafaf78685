"""The packages of the clients in Node, and a syncer's keys and store."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from pathlib import Path

import pytest

from skerry_syncer.store.objects.opening import open_objects
from tests.node.deployment import Deployment
from tests.node.node_clients import HERE, ROOT
from tests.support.made_keys import make_keys

BUILD = ROOT / "build" / "node"


@pytest.fixture(scope="session")
def node_modules() -> Path:
    """The clients' packages, installed once from the lock file into build/."""
    for tool in ("node", "npm"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    lock = (HERE / "package-lock.json").read_bytes()
    stamp = BUILD / "installed.json"
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "installing.lock").open("w") as installing:
        fcntl.flock(installing, fcntl.LOCK_EX)  # test processes run side by side
        if not stamp.exists() or stamp.read_bytes() != lock:
            install()
            stamp.write_bytes(lock)
    return BUILD / "node_modules"


def install() -> None:
    for name in ("package.json", "package-lock.json"):
        shutil.copy(HERE / name, BUILD / name)
    installing = subprocess.run(
        ["npm", "ci", "--no-audit", "--no-fund"],
        cwd=BUILD,
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    if installing.returncode != 0:
        pytest.skip(f"npm could not install the clients' packages: {installing.stderr.strip()[-300:]}")


@pytest.fixture
def deployment(node_modules: Path, tmp_path: Path) -> Deployment:
    """The keys of a server and of every caller, and an empty store."""
    learners = [word for name in ("us", "demo/us", "gpt/us") for word in ("--learner", name)]
    make_keys(tmp_path / "keys", "--server", "a.example", *learners, "--reader", "prom", "--admin", "anna")
    made = Deployment(tmp_path, node_modules)
    open_objects(made.store_url)
    return made
