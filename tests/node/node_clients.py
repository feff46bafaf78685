"""The clients in Node, as processes: `client.cjs`, which trains, and `caller.cjs`, which does what it is told."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.rpc import error_details_pb2, status_pb2

from skerry import Tls
from skerry.v1 import types_pb2 as types
from tests.support.raw_learner import QUICK

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

PLAIN = types.Encoding(codec=types.CODEC_FLOAT32, compressor=types.COMPRESSOR_NONE)
# What `client.cjs` speaks.
POLICY = types.Policy()
POLICY.CopyFrom(QUICK)
POLICY.delta_encoding.CopyFrom(PLAIN)
POLICY.update_encoding.CopyFrom(PLAIN)


async def train(node_modules: Path, port: int, *pems: Path, token: str = "") -> tuple[int | None, str, str]:
    """Returns the exit status of `client.cjs`, what it printed, and its errors."""
    client = await asyncio.create_subprocess_exec(
        "node",
        str(HERE / "client.cjs"),
        str(ROOT / "protos"),
        f"127.0.0.1:{port}",
        "demo",
        "body",
        *map(str, pems),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "NODE_PATH": str(node_modules), "SKERRY_TOKEN": token},
    )
    async with asyncio.timeout(60):
        output, errors = await client.communicate()
    return client.returncode, output.decode(), errors.decode()


def check_steps(output: str) -> None:
    """Checks that `client.cjs` joined, trained, and saw its delta merged."""
    steps = {line["step"]: line for line in map(json.loads, output.splitlines())}
    assert list(steps) == ["run", "attached", "pulled", "pushed", "merged", "updated"]
    assert (steps["pulled"]["version"], steps["pulled"]["kinds"]) == (0, ["OBJECT_KIND_SNAPSHOT"])
    assert (steps["updated"]["version"], steps["updated"]["kinds"]) == (1, ["OBJECT_KIND_UPDATE"])


@dataclass(frozen=True)
class Answer:
    """What a call of `caller.cjs` was answered: its first message, or the status with which it ended."""

    code: str
    message: str = ""
    reason: str = ""  # the server's, of a refused call
    serial: int | None = None  # of the certificate that the server of this connection presented
    answer: Any = None

    @classmethod
    def parse(cls, said: dict[str, Any]) -> Answer:
        """Returns the answer that one line of the client's output gives."""
        info, details = error_details_pb2.ErrorInfo(), said.get("details", "")
        for detail in status_pb2.Status.FromString(base64.b64decode(details)).details:
            detail.Unpack(info)
        serial = said.get("serial")
        answer = said.get("answer", said.get("message") if "code" not in said else None)
        return cls(
            said.get("code", "OK"),
            said["message"] if "code" in said else "",
            info.reason,
            None if serial is None else int(serial, 16),
            answer,
        )


class Caller:
    """A process of `caller.cjs`, with any number of connections, which have names."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def _told(self, **command: Any) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(command).encode() + b"\n")
        async with asyncio.timeout(30):
            line = await stdout.readline()
        assert line, "the client ended; its errors are on standard error"
        said: dict[str, Any] = json.loads(line)
        return said

    async def methods(self) -> dict[str, set[str]]:
        """Returns every method of the contract, with the fields of its first message."""
        return {name: set(fields) for name, fields in (await self._told(do="methods")).items()}

    async def open(self, channel: str, tls: Tls | None) -> None:
        """Makes a connection, which begins with its first call."""
        await self._told(do="open", channel=channel, **_files(tls), token=(tls and tls.token) or "")

    async def connect(self, tls: Tls, version: str, *, resumes: bool) -> tuple[bool, bool]:
        """Returns whether a connection without a call got in, and whether it resumed the last one's TLS session."""
        said = await self._told(do="connect", **_files(tls), version=version, resumes=resumes)
        return said["is_in"], said["is_resumed"]

    async def call(self, channel: str, method: str, **fields: Any) -> Answer:
        """Sends one message with those of the fields that it has, and returns the first answer."""
        return Answer.parse(await self._told(do="call", channel=channel, method=method, fields=fields))

    async def hold(self, channel: str, method: str, **fields: Any) -> Answer:
        """Begins a stream that stays open, likewise."""
        return Answer.parse(await self._told(do="hold", channel=channel, method=method, fields=fields))

    async def heard(self, channel: str) -> Answer:
        """Waits for what comes next on the connection's open stream: a message, or its end."""
        return Answer.parse(await self._told(do="heard", channel=channel))


def _files(tls: Tls | None) -> dict[str, str]:
    files = {} if tls is None else {"ca": tls.ca, "cert": tls.cert, "key": tls.key}
    return {name: str(file) for name, file in files.items() if file is not None}


@contextlib.asynccontextmanager
async def calling(node_modules: Path, port: int) -> AsyncIterator[Caller]:
    """Yields a running `caller.cjs`, which knows the contract and the server's address."""
    process = await asyncio.create_subprocess_exec(
        "node",
        str(HERE / "caller.cjs"),
        str(ROOT / "protos"),
        f"127.0.0.1:{port}",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "NODE_PATH": str(node_modules)},
        limit=2**20,
    )
    try:
        yield Caller(process)
    finally:
        process.kill()
        await process.wait()
