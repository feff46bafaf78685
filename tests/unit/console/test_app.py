"""What a browser is answered where there is no page: the reason, and what to do about it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest
import zstandard
from starlette.testclient import TestClient

from skerry import RunsClient
from skerry.v1.types_pb2 import RUN_STATUS_CLOSED
from skerry_console.app import Console, application, compressed
from skerry_console.view import Settings
from tests.support.syncer_thread import syncer


@pytest.fixture
def browser() -> Iterator[TestClient]:
    with syncer() as target:
        console = Console(lambda: RunsClient(target, timeout_s=5.0), Settings(prices={}))
        with TestClient(application(console, hosts=["testserver"])) as client:
            yield client


def test_a_syncer_without_runs_has_a_page_that_says_how_to_begin(browser: TestClient) -> None:
    answer = browser.get("/")
    assert (answer.status_code, "skerry learn demo" in answer.text) == (200, True)


def test_a_run_that_does_not_exist_is_not_found(browser: TestClient) -> None:
    answer = browser.get("/runs/nothing")
    assert (answer.status_code, "no such run" in answer.text) == (404, True)
    assert browser.get("/runs/A%20B").status_code == 404


def test_a_syncer_that_does_not_answer_is_tried_again_by_the_page() -> None:
    console = Console(lambda: RunsClient("127.0.0.1:1", timeout_s=5.0), Settings(prices={}))
    with TestClient(application(console, hosts=["testserver"])) as client:
        for path in ("/", "/runs/demo"):
            answer = client.get(path)
            assert answer.status_code == 502
            assert 'http-equiv="refresh"' in answer.text


def test_another_sites_name_and_an_action_without_leave_are_refused(browser: TestClient) -> None:
    assert browser.get("/", headers={"Host": "other.example"}).status_code == 400
    assert browser.post("/runs/demo/actions/close", json={"position": 1}).status_code == 403


def test_actions_change_the_run_and_say_why_they_do_not() -> None:
    with syncer() as target, RunsClient(target) as client:
        client.create_run("demo", {"w": np.zeros(4, np.float32)})
        console = Console(lambda: RunsClient(target, timeout_s=5.0), Settings(prices={}, allows_actions=True))
        with TestClient(application(console, hosts=["testserver"]), headers={"X-Skerry-Console": "1"}) as browser:

            def act(name: str, **values: str) -> tuple[int, str]:
                answer = browser.post(f"/runs/demo/actions/{name}", json=values)
                return answer.status_code, answer.text

            assert act("policy", assignments="quorum_count=2 grace_factor=0.25") == (200, "done")
            assert (client.get_policy("demo").quorum_count, client.get_policy("demo").grace_factor) == (2, 0.25)
            assert act("policy", assignments="quorum=2")[0] == 400
            assert act("eject", learner="us") == (409, "no such learner ever attached. learner=us, known=")
            assert act("nothing", learner="us")[0] == 400
            assert act("roll-back")[0] == 400
            assert act("close") == (200, "done")
            assert client.get_run("demo").run.status == RUN_STATUS_CLOSED


async def test_a_stream_of_changes_is_compressed_as_a_whole_and_each_part_can_be_read_when_it_comes() -> None:
    texts = [f"data: {number} {'the same again' * 500}\n\n" for number in range(20)]

    async def stream() -> AsyncIterator[str | bytes]:
        for text in texts:
            yield text

    reader = zstandard.ZstdDecompressor().decompressobj()
    parts = [part async for part in compressed(stream())]
    assert [reader.decompress(part).decode() for part in parts] == texts
    assert sum(map(len, parts[1:])) < 2000
