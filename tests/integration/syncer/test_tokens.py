"""Tokens: who may call with one, until when, and how soon a syncer hears that one was made or revoked."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner

from skerry import RunsClient, Tls, TryAgainError
from skerry.cli.runs import runs as runs_command
from skerry.runtime.identifiers import SystemEntropy
from skerry.v1 import exchange_pb2 as exchange
from skerry.v1 import runs_pb2 as runs
from skerry.wire.identity import Identity, Role
from skerry_syncer.access import token_book
from skerry_syncer.access.token_book import POLL_S, TokenBook
from skerry_syncer.errors import SyncerError
from skerry_syncer.server import SyncerServer, serving
from skerry_syncer.store.errors import StoreFullError, StoreUnavailableError
from skerry_syncer.store.objects.interface import Objects
from skerry_syncer.store.objects.opening import open_objects
from skerry_syncer.store.tokens import REVOKED, Token, create_token, read_token, revoke_token, token_digest
from tests.integration.syncer.conftest import LOCAL
from tests.support.dict_objects import DictObjects
from tests.support.made_keys import make_keys, tls_of
from tests.support.made_tokens import in_thread, skerry_tokens
from tests.support.raw_learner import RawLearner, connected, create_run, refused
from tests.support.stuck_objects import StuckObjects

US = Identity(Role.LEARNER, "us")


class SetClock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.slept_s: list[float] = []

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_s(self) -> float:
        return self.now_s

    async def sleep(self, duration_s: float) -> None:
        self.slept_s.append(duration_s)
        await asyncio.Event().wait()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", "--server", "a.example", "--admin", "anna")
    return tmp_path / "keys"


@pytest.fixture
async def server(keys: Path, store_url: str) -> AsyncIterator[SyncerServer]:
    settings = replace(LOCAL, tls=tls_of(keys, "a.example", ca=False), has_tokens=True)
    async with serving(open_objects(store_url), settings) as started:
        yield started


async def heard(port: int, tls: Tls) -> None:
    """Returns once the server knows the token, which must be within 10 s."""
    async with asyncio.timeout(10), connected(port, tls) as stubs:
        while True:
            try:
                await stubs.runs.GetRun(runs.GetRunRequest(name="demo"))
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
                    return
            await asyncio.sleep(0.1)


async def test_a_token_is_honoured_within_10_s_and_its_calls_end_within_10_s_of_its_revocation(
    server: SyncerServer, keys: Path, store_url: str
) -> None:
    token = (await in_thread("create", "--store", store_url, "--role", "learner", "--name", "us")).strip()
    tls = replace(tls_of(keys), token=token)
    await heard(server.port, tls)
    async with connected(server.port, tls) as stubs:
        run, _ = await create_run(stubs)
        learner = RawLearner(stubs, run, "us", random.Random(1))
        await learner.attach()
        watch = stubs.exchange.Watch(exchange.WatchRequest(run="demo"))
        await watch.read()
        listed = await in_thread("list", "--store", store_url)
        assert "skerry://learner/us" in listed
        assert token not in listed
        await in_thread("revoke", "--store", store_url, listed.split()[0])
        async with asyncio.timeout(10):
            with refused("UNAUTHENTICATED", grpc.StatusCode.UNAUTHENTICATED):
                await learner.event("no such kind")
            assert learner.call is not None
            with refused("UNAUTHENTICATED", grpc.StatusCode.UNAUTHENTICATED):
                while await watch.read():
                    pass
        with refused("UNAUTHENTICATED", grpc.StatusCode.UNAUTHENTICATED):
            await stubs.runs.GetRun(runs.GetRunRequest(name="demo"))


async def test_a_client_takes_the_token_that_its_file_has_now(
    server: SyncerServer, keys: Path, store_url: str, tmp_path: Path
) -> None:
    file = tmp_path / "anna.token"
    file.write_text("skerry_old\n")
    words = ("create", "--store", store_url, "--role", "admin", "--name", "anna")
    token = (await in_thread(*words)).strip()
    await heard(server.port, replace(tls_of(keys), token=token))

    def ask() -> None:
        with RunsClient(f"127.0.0.1:{server.port}", tls=replace(tls_of(keys), token_file=file)) as client:
            with pytest.raises(TryAgainError, match="not known here, was revoked or has expired"):
                client.list_runs()
            file.write_text(f"{token}\n")
            assert client.list_runs() == []
        words = ["list", "--json", "--target", f"127.0.0.1:{server.port}", "--tls-ca", str(keys / "ca.pem")]
        for option, env in ((["--token-file", str(file)], {}), ([], {"SKERRY_TOKEN": token})):
            answer = CliRunner().invoke(runs_command, [*words, *option], env=env)
            assert answer.output == "[]\n"

    await asyncio.to_thread(ask)


async def test_a_certificate_and_a_token_may_be_wanted_both_and_the_token_decides(keys: Path, store_url: str) -> None:
    settings = replace(LOCAL, tls=tls_of(keys, "a.example"), has_tokens=True)
    async with serving(open_objects(store_url), settings) as server:
        token = (await in_thread("create", "--store", store_url, "--role", "reader", "--name", "prom")).strip()
        reader = replace(tls_of(keys, "anna"), token=token)
        await heard(server.port, reader)
        async with connected(server.port, reader) as stubs:
            with refused("PERMISSION_DENIED", grpc.StatusCode.PERMISSION_DENIED):
                await stubs.runs.CloseRun(runs.CloseRunRequest(name="demo"))
        async with connected(server.port, tls_of(keys, "anna")) as stubs:
            with refused("RUN_NOT_FOUND", grpc.StatusCode.NOT_FOUND):
                await stubs.runs.CloseRun(runs.CloseRunRequest(name="demo"))
        async with connected(server.port, replace(tls_of(keys, "anna"), token="skerry_unknown")) as stubs:
            with refused("UNAUTHENTICATED", grpc.StatusCode.UNAUTHENTICATED):
                await stubs.runs.ListRuns(runs.ListRunsRequest())


async def test_a_server_does_not_listen_before_it_knows_the_tokens_of_its_store(keys: Path) -> None:
    objects = StuckObjects()
    token = await create_token(objects, US, SystemEntropy(), now_unix_s=time.time(), lifetime_s=60.0)
    objects.unread = "tokens/"
    settings = replace(LOCAL, tls=tls_of(keys, "a.example", ca=False), has_tokens=True)
    asyncio.get_running_loop().call_later(0.5, objects.go.set)
    async with (
        serving(objects, settings) as server,
        connected(server.port, replace(tls_of(keys), token=token)) as stubs,
    ):
        with refused("RUN_NOT_FOUND", grpc.StatusCode.NOT_FOUND):
            await stubs.runs.GetRun(runs.GetRunRequest(name="demo"))


async def test_all_tokens_of_a_store_are_known_at_the_start() -> None:
    objects = open_objects("memory://")
    made = [await create_token(objects, US, SystemEntropy(), now_unix_s=1000.0, lifetime_s=60.0) for _ in range(100)]
    book = await TokenBook(objects, SetClock()).begin()
    assert [token for token in made if not book.knows(token)] == []


async def test_a_syncer_begins_when_the_store_has_answered_for_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = open_objects("memory://")
    made = [await create_token(objects, US, SystemEntropy(), now_unix_s=1000.0, lifetime_s=60.0) for _ in range(3)]
    failures = [StoreUnavailableError("it took too long")]

    async def read(store: Objects, digest: str) -> Token:
        if failures:
            raise failures.pop()
        return await read_token(store, digest)

    monkeypatch.setattr(token_book, "read_token", read)
    monkeypatch.setattr(SetClock, "sleep", lambda *_: asyncio.sleep(0))
    book = await TokenBook(objects, SetClock()).begin()
    assert [token for token in made if not book.knows(token)] == []


async def test_a_token_ends_at_its_time_and_so_do_its_calls() -> None:
    clock, objects = SetClock(), open_objects("memory://")
    token = await create_token(objects, US, SystemEntropy(), now_unix_s=clock.now_s, lifetime_s=60.0)
    book = TokenBook(objects, clock)
    await book.refresh()
    clock.now_s += 59.9

    async def call() -> None:
        async with asyncio.timeout(5), book.calling(token) as caller:
            assert caller == US
            await book.refresh()
            clock.now_s += 0.1
            await book.refresh()
            await asyncio.Event().wait()

    with pytest.raises(SyncerError, match="has expired"):
        await call()
    with pytest.raises(SyncerError, match="has expired"):
        async with book.calling(token):
            pass


async def test_what_can_not_be_read_is_no_token_and_hides_no_other() -> None:
    objects, book_clock = open_objects("memory://"), SetClock()
    token = await create_token(objects, US, SystemEntropy(), now_unix_s=1000.0, lifetime_s=60.0)
    for name, values in {"a": {}, "b": {"format": 2}, "c": {"format": 1, "identity": "skerry://owner/us"}}.items():
        await objects.create(f"tokens/{name * 64}", json.dumps(values).encode())
    book = TokenBook(objects, book_clock)
    await book.refresh()
    async with book.calling(token) as caller:
        assert caller == US
    await revoke_token(objects, token_digest(token), now_unix_s=2000.0)
    await book.refresh()
    with pytest.raises(SyncerError, match="revoked"):
        async with book.calling(token):
            pass


async def test_a_timeout_of_the_call_itself_stays_one() -> None:
    objects = open_objects("memory://")
    token = await create_token(objects, US, SystemEntropy(), now_unix_s=1000.0, lifetime_s=60.0)
    book = TokenBook(objects, SetClock())
    await book.refresh()
    with pytest.raises(TimeoutError):
        async with book.calling(token):
            raise TimeoutError


def test_the_store_is_looked_through_often_enough() -> None:
    assert POLL_S <= 5, "a listing may take some seconds too"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--role", "admin", "--name", "anna", "--run", "demo"), "Only a learner may have a --run and a --weight"),
        (("--role", "admin", "--name", "anna", "--weight", "8"), "Only a learner may have a --run and a --weight"),
        (("--role", "learner", "--name", "us", "--weight", "1001"), "is not in the range"),
        (("--role", "learner", "--name", "us", "--weight", "nan"), "nan is not a number"),
        (("--role", "learner", "--name", "../us"), "name is not legal"),
        (("--role", "owner", "--name", "anna"), "is not one of"),
    ],
)
def test_a_token_for_nobody_is_not_made(words: tuple[str, ...], says: str, tmp_path: Path) -> None:
    said = skerry_tokens("create", "--store", (tmp_path / "store").as_uri(), *words, status=2)
    assert says in said


async def test_only_the_hash_of_a_token_is_in_the_store(store_url: str, tmp_path: Path) -> None:
    open_objects(store_url)
    words = ("--store", store_url, "--role", "learner", "--name", "us", "--run", "gpt", "--days", "2")
    token = (await in_thread("create", *words)).strip()
    stored = {path.name: path.read_bytes() for path in (tmp_path / "store" / "tokens").iterdir()}
    assert list(stored) == [token_digest(token)]
    assert token.encode() not in stored[token_digest(token)]
    values = json.loads(stored[token_digest(token)])
    assert values["identity"] == "skerry://learner/gpt/us"
    assert values["expires_at_unix_s"] - values["created_at_unix_s"] == 2 * 86_400


async def test_a_token_has_its_learners_weight_and_the_list_shows_it(store_url: str) -> None:
    open_objects(store_url)
    await in_thread("create", "--store", store_url, "--role", "learner", "--name", "us", "--weight", "8")
    assert "  skerry://learner/us?weight=8  made" in await in_thread("list", "--store", store_url)


async def test_the_store_keeps_which_tokens_were_revoked_and_when(store_url: str) -> None:
    open_objects(store_url)
    for name in ("eu", "us"):
        await in_thread("create", "--store", store_url, "--role", "learner", "--name", name)
    digest = (await in_thread("list", "--store", store_url)).splitlines()[1].split()[0]
    await in_thread("revoke", "--store", store_url, digest)
    assert "learner/us" not in await in_thread("list", "--store", store_url)
    eu, us = (await in_thread("list", "--store", store_url, "--all")).splitlines()
    assert "  skerry://learner/eu  made 20" in eu
    assert "  valid until 20" in eu
    assert us.startswith(f"{digest}  skerry://learner/us  made 20")
    assert "  revoked 20" in us


async def test_a_revocation_that_was_cut_off_can_be_repeated() -> None:
    objects = DictObjects()
    digest = token_digest(await create_token(objects, US, SystemEntropy(), now_unix_s=1.0, lifetime_s=60.0))
    stored = await objects.get(f"tokens/{digest}")
    for now_s in (2.0, 3.0):
        await revoke_token(objects, digest, now_unix_s=now_s)
        assert list(objects.objects) == [f"revoked-tokens/{digest}"]
        assert (await read_token(objects, digest, REVOKED)).revoked_at_unix_s == 2.0
        await objects.create(f"tokens/{digest}", stored)


async def test_a_token_is_revoked_even_if_the_store_has_no_space_for_the_record() -> None:
    class Full(DictObjects):
        async def create(self, name: str, data: bytes) -> None:
            if name.startswith(REVOKED):
                raise StoreFullError("no space")
            await super().create(name, data)

    objects = Full()
    token = await create_token(objects, US, SystemEntropy(), now_unix_s=1.0, lifetime_s=60.0)
    with pytest.raises(StoreFullError):
        await revoke_token(objects, token_digest(token), now_unix_s=2.0)
    assert objects.objects == {}
