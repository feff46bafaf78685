"""A syncer whose store is Ceph's S3 gateway; the gateway is then there for the contract of `tests/store`, too."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import boto3
import pytest
from click.testing import CliRunner

from skerry_syncer.command import serve
from skerry_syncer.store.errors import ObjectExistsError
from skerry_syncer.store.log.entries import Fate
from skerry_syncer.store.objects.opening import open_objects
from tests.e2e.ceph import CephGateway
from tests.support.audit import check_fates, final_state
from tests.support.serve_process import ServeProcess, serve_process

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

_BUCKET = "skerry-e2e"
_KILL_COUNT = 3


@pytest.fixture
def store_url(ceph_gateway: CephGateway, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """An empty prefix of a bucket, found by what the environment says, as a person would have it."""
    for name, value in ceph_gateway.env().items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket=_BUCKET)
    return f"s3://{_BUCKET}/{request.node.name}"


@asynccontextmanager
async def learner(name: str, *, port: int, folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """A small learner that trains until it is asked to stop; ended in any case."""
    with (folder / f"{name}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "skerry.cli.main", "learn", "--target", f"127.0.0.1:{port}", "demo",
            "--learner-id", name, "--region", name, "--create", "--model", "nano", "--steps", "1000000",
            "--inner-steps", "100", "--work-dir", str(folder / name),
            stdout=log, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def skerry(*words: str) -> str:
    """Returns what one of the commands printed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "skerry.cli.main", *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60):
        output, errors = await process.communicate()
    assert process.returncode == 0, f"{words}: status {process.returncode}\n{errors.decode()[-2000:]}"
    return output.decode()


async def versions_beyond(serve: ServeProcess, before: dict[str, int], *, count: int) -> dict[str, int]:
    """Returns the versions of all fragments when each is `count` beyond `before`."""
    async with asyncio.timeout(150):
        while True:
            try:
                shown = json.loads(
                    await skerry("runs", "show", "demo", "--json", "--target", f"127.0.0.1:{serve.port}")
                )
            except AssertionError:
                shown = {"run": {"versions": []}}  # the learners are still creating it
            versions = {item["fragment"]: int(item["version"]) for item in shown["run"]["versions"]}
            if versions and all(version >= before.get(name, 0) + count for name, version in versions.items()):
                return versions
            await asyncio.sleep(0.2)


async def test_of_many_writers_of_one_number_the_gateway_lets_one_win(store_url: str) -> None:
    objects = [open_objects(store_url) for _ in range(4)]
    for number in range(25):
        name = f"log/{number:020d}"
        answers = await asyncio.gather(
            *(store.create(name, b"%d" % writer) for writer, store in enumerate(objects)), return_exceptions=True
        )
        assert [type(answer) for answer in answers].count(ObjectExistsError) == len(objects) - 1, answers
        assert await objects[0].get(name) == b"%d" % answers.index(None)


def test_a_syncer_whose_secret_is_wrong_ends_with_what_the_gateway_said(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    result = CliRunner().invoke(serve, ["--listen", "127.0.0.1:0", "--store", store_url])
    assert result.exit_code == 2
    assert "SignatureDoesNotMatch" in result.output


async def test_a_syncer_on_ceph_is_killed_again_and_again_and_no_delta_is_lost_or_merged_twice(
    store_url: str, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        serve = await stack.enter_async_context(serve_process(store_url, tmp_path))
        learners = [
            await stack.enter_async_context(learner(name, port=serve.port, folder=tmp_path)) for name in ("us", "eu")
        ]
        versions = await versions_beyond(serve, {}, count=1)
        for _ in range(_KILL_COUNT):
            await serve.kill()
            await serve.start()
            versions = await versions_beyond(serve, versions, count=2)
        for process in learners:
            process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert [await process.wait() for process in learners] == [0, 0]
        closed = json.loads(await skerry("runs", "close", "demo", "--json", "--target", f"127.0.0.1:{serve.port}"))
        serve.terminate()
        assert await serve.exit_status() == 0
    await skerry("verify", "--store", store_url, "demo")
    fates = check_fates(await final_state(store_url, "demo", closed["uid"]), set())
    last = [json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1]) for name in ("us", "eu")]
    assert sum(line["deltas_acknowledged"] for line in last) <= sum(fates.values())
    assert fates[Fate.MERGED] > 0
