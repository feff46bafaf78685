"""A client in another language, from the committed .proto files alone: float32 without compression, in Node."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from skerry.store.objects.opening import open_objects
from skerry.syncer.server import ServerSettings, serving
from skerry.v1 import types_pb2 as types
from tests.syncer.raw_learner import QUICK, connected, create_run

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "node"


@pytest.fixture(scope="session")
def node_modules() -> Path:
    """The client's packages, installed once from the lock file into build/."""
    for tool in ("node", "npm"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    lock = (HERE / "package-lock.json").read_bytes()
    stamp = BUILD / "installed.json"
    if not stamp.exists() or stamp.read_bytes() != lock:
        BUILD.mkdir(parents=True, exist_ok=True)
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
            pytest.skip(f"npm could not install the client's packages: {installing.stderr.strip()[-300:]}")
        stamp.write_bytes(lock)
    return BUILD / "node_modules"


async def test_a_node_client_follows_a_run_pulls_pushes_and_sees_its_delta_merged(
    node_modules: Path, tmp_path: Path
) -> None:
    policy = types.Policy()
    policy.CopyFrom(QUICK)
    plain = types.Encoding(codec=types.CODEC_FLOAT32, compressor=types.COMPRESSOR_NONE)
    policy.delta_encoding.CopyFrom(plain)
    policy.update_encoding.CopyFrom(plain)
    objects = open_objects((tmp_path / "store").as_uri())
    async with serving(objects, ServerSettings(listen="127.0.0.1:0")) as server, connected(server.port) as stubs:
        await create_run(stubs, policy=policy)
        client = await asyncio.create_subprocess_exec(
            "node",
            str(HERE / "client.cjs"),
            str(ROOT / "protos"),
            f"127.0.0.1:{server.port}",
            "demo",
            "body",
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "NODE_PATH": str(node_modules)},
        )
        async with asyncio.timeout(60):
            output, errors = await client.communicate()
    assert client.returncode == 0, errors.decode()
    steps = {line["step"]: line for line in map(json.loads, output.decode().splitlines())}
    assert list(steps) == ["run", "attached", "pulled", "pushed", "merged", "updated"]
    assert (steps["pulled"]["version"], steps["pulled"]["kinds"]) == (0, ["OBJECT_KIND_SNAPSHOT"])
    assert (steps["updated"]["version"], steps["updated"]["kinds"]) == (1, ["OBJECT_KIND_UPDATE"])
