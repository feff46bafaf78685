"""`skerry serve` on the command line: what it refuses, what it says, and how it ends."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import grpc
from click.testing import CliRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc

from skerry.v1 import exchange_pb2 as exchange
from skerry.v1 import runs_pb2 as runs
from skerry_syncer.command import serve
from tests.support.made_keys import make_keys
from tests.support.raw_learner import (
    INT4,
    attached,
    connected,
    create_run,
    delta_values,
    pull,
    push_messages,
    refused,
)
from tests.support.serve_process import serve_process

MEMORY = ("--store", "memory://")
NEW = ("--new-store", "--store", "file://{keys}/store")
PAIR = ("--tls-cert", "{keys}/a.example.pem", "--tls-key", "{keys}/a.example.key")
REFUSED: list[tuple[tuple[str, ...], str]] = [
    (("--new-store", "--store", "ftp://nowhere"), "scheme is not known"),
    (("--new-store", "--store", "file://{keys}/ca.pem", "--metrics", "0.0.0.0:0"), "can't be used"),
    (("--store", "file://{keys}/mount"), "`skerry serve --new-store` begins a new store."),
    ((*MEMORY, "--listen", "127.0.0.1"), "HOST:PORT"),
    ((*MEMORY, "--metrics", "9464"), "HOST:PORT"),
    *(
        ((*MEMORY, "--listen", listen), way)
        for listen in ("0.0.0.0:0", "[::]:0")
        for way in ("skerry keys", "--tls-cert", "127.0.0.1", "--insecure")
    ),
    ((*NEW, "--listen", "127.0.0.1:{taken}"), "can't listen on the address. address=127.0.0.1:{taken}"),
    ((*NEW, "--metrics", "127.0.0.1:{taken}"), "can't listen on the address. address=127.0.0.1:{taken}"),
    ((*MEMORY, "--tls-cert", "{keys}/a.example.pem"), "must be given together"),
    ((*MEMORY, "--tls-client-ca", "{keys}/ca.pem"), "needs the server's own certificate"),
    ((*MEMORY, "--tls-cert", "{keys}/us.pem", "--tls-key", "{keys}/us.key"), "--tls-cert is a client's certificate"),
]


def test_options_that_can_not_be_right_are_said_before_it_serves(tmp_path: Path) -> None:
    make_keys(tmp_path, "--server", "a.example", "--learner", "us")
    before = sorted(tmp_path.iterdir())
    with socket.create_server(("127.0.0.1", 0)) as server:
        facts = {"keys": tmp_path, "taken": server.getsockname()[1]}
        for words, reason in REFUSED:
            arguments = [word.format(**facts) for word in words]
            result = CliRunner().invoke(serve, ["--listen", "127.0.0.1:0", *arguments])
            assert (words, result.exit_code) == (words, 2)
            assert reason.format(**facts) in result.output, words
    assert sorted(tmp_path.iterdir()) == before


async def test_neither_output_nor_log_shows_the_secrets_of_the_store(tmp_path: Path) -> None:
    async with serve_process("memory://user:hunter2@x?secret_key=hunter2", tmp_path) as process:
        process.terminate()
        await process.exit_status()
    assert "hunter2" not in process.first_line + (tmp_path / "serve.log").read_text()


async def test_sigterm_drains(store_url: str, tmp_path: Path) -> None:
    async with (
        serve_process(store_url, tmp_path, "--drain-grace", "30", "--port-file", f"{tmp_path}/port") as process,
        connected(process.port) as stubs,
    ):
        run, _ = await create_run(stubs)
        learner = await attached(stubs, run)
        header = learner.header(await pull(stubs, run, "body"), "body")
        messages = push_messages(header, delta_values(), INT4)
        call = stubs.exchange.PushDelta(None)
        for message in messages[:3]:
            await call.write(message)
        health = health_pb2_grpc.HealthStub(stubs.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
        process.terminate()
        assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with refused("DRAINING", grpc.StatusCode.UNAVAILABLE) as caught:
            await learner.event("status_changed")
        assert caught[0].retry_after_s is not None
        for message in messages[3:]:  # a push in flight ends normally
            await call.write(message)
        await call.done_writing()
        assert (await call).state == exchange.PUSH_STATE_ACCEPTED
        assert (tmp_path / "port").read_text() == f"{process.port}\n"
        assert await process.exit_status() == 0  # before the grace ends, though health is still watched
        await process.start()
        await stubs.runs.GetRun(runs.GetRunRequest(name="demo"), wait_for_ready=True)
        assert (await learner.query(header)).state == exchange.PUSH_STATE_ACCEPTED


async def test_a_second_signal_ends_it_at_once(store_url: str, tmp_path: Path) -> None:
    async with (
        serve_process(store_url, tmp_path, "--drain-grace", "3600") as process,
        connected(process.port) as stubs,
    ):
        learner = await attached(stubs, (await create_run(stubs))[0])
        header = learner.header(await pull(stubs, learner.run, "body"), "body")
        await stubs.exchange.PushDelta(None).write(push_messages(header, delta_values(), INT4)[0])
        process.terminate()
        with refused("DRAINING", grpc.StatusCode.UNAVAILABLE):
            await learner.event("status_changed")
        process.terminate()
        assert await process.exit_status() == -signal.SIGTERM
