"""A syncer whose store is Ceph's S3 gateway; the gateway is then there for the contract of `tests/store`, too."""

from __future__ import annotations

import asyncio
from pathlib import Path

import boto3
import pytest
from click.testing import CliRunner

from skerry.cli.main import cli
from skerry.v1 import runs_pb2 as runs
from skerry_syncer.command import serve as serve_command
from skerry_syncer.store.errors import ObjectExistsError
from skerry_syncer.store.log.entries import Fate
from skerry_syncer.store.objects.opening import open_objects
from tests.e2e.ceph import CephGateway
from tests.support.audit import check_fates, final_state
from tests.support.raw_learner import attached, connected, create_run
from tests.support.serve_process import serve_process

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

_BUCKET = "skerry-e2e"


@pytest.fixture
def store_url(ceph_gateway: CephGateway, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """An empty prefix of a bucket, found by what the environment says, as a person would have it."""
    for name, value in ceph_gateway.env().items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket=_BUCKET)
    return f"s3://{_BUCKET}/{request.node.name}"


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
    result = CliRunner().invoke(serve_command, ["--listen", "127.0.0.1:0", "--store", store_url])
    assert result.exit_code == 2
    assert "SignatureDoesNotMatch" in result.output


async def test_a_run_on_ceph_goes_on_after_a_kill_and_every_version_is_verified(store_url: str, tmp_path: Path) -> None:
    async with serve_process(store_url, tmp_path) as serve, connected(serve.port) as stubs:
        run, _ = await create_run(stubs)
        learner = await attached(stubs, run)
        await learner.advance(1)
        await serve.kill()
        await serve.start()
        await stubs.runs.GetRun(runs.GetRunRequest(name=run.name), wait_for_ready=True)
        await learner.attach()
        await learner.advance(2)
        await stubs.runs.CloseRun(runs.CloseRunRequest(name=run.name))
        serve.terminate()
        assert await serve.exit_status() == 0
    result = await asyncio.to_thread(CliRunner().invoke, cli, ["verify", "--store", store_url, run.name])
    assert result.exit_code == 0, result.output
    state = await final_state(open_objects(store_url), run.name, run.uid)
    fates = check_fates(state, {header.delta_id for header in learner.pushed})
    assert fates[Fate.MERGED] == 2 + 2, "and the initial weights of two fragments"
