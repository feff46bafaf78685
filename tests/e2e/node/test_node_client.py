"""A client in another language, from the committed .proto files alone: float32 without compression, in Node."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from skerry.v1 import types_pb2 as types
from skerry_syncer.server import serving
from skerry_syncer.store.objects.opening import open_objects
from tests.integration.syncer.conftest import LOCAL
from tests.support.made_keys import make_keys, tls_of
from tests.support.raw_learner import QUICK, connected, create_run

pytestmark = pytest.mark.e2e

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
BUILD = ROOT / "build" / "node-client"
PLAIN = types.Encoding(codec=types.CODEC_FLOAT32, compressor=types.COMPRESSOR_NONE)


@pytest.fixture
def node_modules() -> Path:
    """The client's packages, installed once from the lock file into build/."""
    for tool in ("node", "npm"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    BUILD.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copy(HERE / name, BUILD / name)
    words = ["npm", "ci", "--no-audit", "--no-fund", "--prefer-offline"]
    installing = subprocess.run(words, cwd=BUILD, capture_output=True, text=True, check=False, timeout=180)
    if installing.returncode:
        pytest.skip(f"npm could not install the client's packages: {installing.stderr.strip()[-300:]}")
    return BUILD / "node_modules"


async def test_a_node_client_agrees_with_the_vectors_and_sees_its_delta_merged_over_mutual_tls(
    node_modules: Path, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    make_keys(keys, "--server", "localhost", "--learner", "node", "--admin", "anna")
    policy = types.Policy(delta_encoding=PLAIN, update_encoding=PLAIN)
    policy.MergeFrom(QUICK)
    async with (
        serving(open_objects("memory://"), replace(LOCAL, tls=tls_of(keys, "localhost"))) as server,
        connected(server.port, tls_of(keys, "anna")) as stubs,
    ):
        await create_run(stubs, policy=policy)
        folders = (ROOT / "protos", ROOT / "tests" / "unit" / "wire" / "vectors")
        pems = (keys / name for name in ("ca.pem", "node.pem", "node.key"))
        words = ["node", HERE / "client.cjs", *folders, f"127.0.0.1:{server.port}", "demo", "body", *pems]
        pipe = asyncio.subprocess.PIPE
        env = {**os.environ, "NODE_PATH": str(node_modules)}
        client = await asyncio.create_subprocess_exec(*map(str, words), stdout=pipe, stderr=pipe, env=env)
        async with asyncio.timeout(60):
            output, errors = await client.communicate()
    assert client.returncode == 0, errors.decode()
    steps = {line["step"]: line for line in map(json.loads, output.splitlines())}
    assert list(steps) == ["vectors", "run", "attached", "pulled", "pushed", "merged", "updated"]
    assert (steps["pulled"]["version"], steps["pulled"]["kinds"]) == (0, ["OBJECT_KIND_SNAPSHOT"])
    assert (steps["updated"]["version"], steps["updated"]["kinds"]) == (1, ["OBJECT_KIND_UPDATE"])
