"""What one client may take of a syncer's time, memory and connections, so that the others go on."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import random
import resource
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
import zstandard
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from skerry.runtime.clock import SystemClock
from skerry.v1 import exchange_pb2 as exchange
from skerry.v1 import runs_pb2 as runs
from skerry.v1 import types_pb2 as types
from skerry.wire.codecs import Compressor
from skerry.wire.digests import delta_digest
from skerry.wire.frames import FrameBatch
from skerry_syncer.access import limits as quotas
from skerry_syncer.access.limits import CallsToRuns, Rate, orphans
from skerry_syncer.errors import SyncerError
from skerry_syncer.rounds import membership
from skerry_syncer.rpc import exchange as exchange_service
from skerry_syncer.run import host
from skerry_syncer.run.descriptors import most_connections
from skerry_syncer.run.host import HostSettings
from skerry_syncer.run.parts import ByteBudget, PartChecker
from skerry_syncer.server import ServerSettings, SyncerServer, serving
from skerry_syncer.store.log.entries import SessionItem
from skerry_syncer.store.objects.opening import open_objects
from tests.integration.syncer.conftest import LOCAL
from tests.support import forgery
from tests.support.dict_objects import DictObjects
from tests.support.raw_learner import (
    FLOAT32,
    RawLearner,
    Stubs,
    connected,
    create_run,
    hex_id,
    is_answer_lost,
    layout,
    pull,
    push_messages,
    refused,
    send,
)
from tests.support.still_clock import StillClock

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
ZEROS = 2**18  # elements of the largest frame


async def attached(stubs: Stubs, name: str = "greedy") -> tuple[RawLearner, exchange.PushHeader]:
    run, _ = await create_run(stubs)
    learner = RawLearner(stubs, run, name, random.Random(7))
    await learner.attach()
    return learner, learner.header(await pull(stubs, run, "body"), "body")


async def test_a_sender_that_holds_its_share_waits_and_the_others_do_not() -> None:
    budget = ByteBudget(1600, SystemClock())
    other = await budget.reserve("other", 10)
    held = [await budget.reserve("greedy", 50) for _ in range(2)]
    waiting = asyncio.create_task(budget.reserve("greedy", 50))
    await asyncio.wait([waiting], timeout=0.01)
    assert not waiting.done()
    passing = await asyncio.wait_for(budget.reserve("honest", 100), 1)
    held[0].release()
    last = await asyncio.wait_for(waiting, 1)
    for one in (other, held[1], passing, last):
        one.release()
    assert budget.used_bytes == 0


async def test_a_sender_that_is_alone_leaves_room_for_the_next() -> None:
    budget = ByteBudget(1600, SystemClock())
    waiting = [asyncio.create_task(budget.reserve("greedy", 50)) for _ in range(40)]
    await asyncio.wait(waiting, timeout=0.01)
    assert sum(one.done() for one in waiting) == 2
    await asyncio.wait_for(budget.reserve("honest", 1000), 1)
    for one in waiting:
        one.cancel()


async def test_a_part_that_comes_too_slowly_is_ended(stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "GRACE_S", 0.3)
    learner, header = await attached(stubs)
    values = np.ones(layout("body").numel, np.float32)

    async def drip(call: Any) -> None:
        for message in push_messages(header, values, FLOAT32)[:2]:
            await call.write(message)
        for byte in forgery.float32_frame(values):
            await call.write(exchange.PushDeltaRequest(data=bytes([byte])))
            await asyncio.sleep(0.05)

    async def dripped() -> None:
        """Returns once gRPC has not lost the answer."""
        for _ in range(20):
            call = stubs.exchange.PushDelta(None)
            dripping = asyncio.create_task(drip(call))
            try:
                await call
            except grpc.aio.AioRpcError as error:
                if not is_answer_lost(error):
                    raise
            finally:
                dripping.cancel()
                await asyncio.wait([dripping])

    began_s = time.monotonic()
    with refused("TOO_SLOW", EXHAUSTED) as caught:
        await dripped()
    assert caught.refusal.retry_after_s
    assert time.monotonic() - began_s < 5
    answer = await learner.push(header, values)
    assert answer.state == exchange.PUSH_STATE_ACCEPTED
    learner.detach()


async def _create_large(stubs: Stubs, numel: int) -> exchange.PushHeader:
    """Returns a header for the initial weights of a draft with one tensor."""
    request_id = hex_id(random.Random(3))
    draft = await stubs.runs.CreateRun(
        runs.CreateRunRequest(
            request_id=request_id,
            name="large",
            tensors=[types.Tensor(name="w", shape=[numel], dtype="float32")],
            fragments=[types.Fragment(name="all", tensors=["w"])],
        )
    )
    return exchange.PushHeader(
        run="large",
        run_uid=draft.run.uid,
        learner_id="a",
        session_id=request_id,
        delta_id="1" * 32,
        fragment="all",
        base_version=-1,
    )


def _zeros(count: int) -> Iterator[bytes]:
    payload = zstandard.ZstdCompressor(level=19).compress(bytes(4 * ZEROS))
    for number in range(count):
        yield forgery.frame(payload, compressor=Compressor.ZSTD, first=number * ZEROS, numel=ZEROS, raw_size=4 * ZEROS)


async def test_zeros_that_decode_to_hundreds_of_megabytes_are_not_decoded_on_the_loop(
    stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, check = set[str](), PartChecker.check

    def spied(self: PartChecker, batches: Sequence[FrameBatch]) -> None:
        threads.add(threading.current_thread().name)
        check(self, batches)

    monkeypatch.setattr(PartChecker, "check", spied)
    data = b"".join(_zeros(100))
    assert len(data) < 31 * 2**10
    header = await _create_large(stubs, 100 * ZEROS)
    with refused("DIGEST_MISMATCH", grpc.StatusCode.INVALID_ARGUMENT):
        await stubs.exchange.PushDelta(iter(forgery.messages(header, data, numel=100 * ZEROS)))
    assert "MainThread" not in threads


async def test_a_part_that_would_decode_to_more_than_any_is_refused(stubs: Stubs) -> None:
    header = await _create_large(stubs, 2**27)
    with refused("TOO_LARGE", EXHAUSTED):
        await stubs.exchange.PushDelta(iter(forgery.messages(header, b"", numel=2**27)))


async def test_frames_of_one_element_are_refused(stubs: Stubs) -> None:
    header = await _create_large(stubs, 1000)
    data = b"".join(forgery.float32_frame(np.zeros(1, np.float32), first=at) for at in range(1000))
    with refused("TOO_LARGE", EXHAUSTED):
        await stubs.exchange.PushDelta(iter(forgery.messages(header, data, numel=1000)))


async def test_what_was_refused_is_freed(stubs: Stubs) -> None:
    run, _ = await create_run(stubs)
    hello = RawLearner(stubs, run, "a", random.Random(7)).hello()
    hello.run_uid = "0" * 32
    for number in range(2000):
        hello.tensors.add(name=f"{number}" + "n" * 100, shape=[1])
    gc.collect()
    gc.disable()
    process, grown = psutil.Process(), list[int]()
    try:
        for _ in range(2):
            before = process.memory_info().rss
            for _ in range(150):
                call = stubs.exchange.Attach(iter([exchange.AttachRequest(hello=hello)]))
                assert await call.code() != grpc.StatusCode.OK
            grown.append(process.memory_info().rss - before)
    finally:
        gc.enable()
    assert grown[1] < 20 * 2**20, grown


async def test_reports_are_read_slowly_and_the_last_one_counts(stubs: Stubs) -> None:
    learner, _ = await attached(stubs)
    seen = list[types.Event]()
    watch = stubs.exchange.Watch(exchange.WatchRequest(run="demo"))
    await watch.read()

    async def watching() -> None:
        while isinstance(response := await watch.read(), exchange.WatchResponse):
            seen.append(response.event)

    task = asyncio.create_task(watching())
    for learner.step in range(200):
        await learner.report()
    await asyncio.sleep(1)
    watch.cancel()
    await asyncio.wait([task])
    assert 5 < len(seen) < 60
    learner.detach()


def test_connections_leave_files_for_the_store() -> None:
    old = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        for soft in (256, 1024):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, old[1]))
            count = most_connections()
            raised = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            assert raised >= min(4352, old[1])
            assert 0 < count < raised
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, old)


async def _created_large(stubs: Stubs, numel: int) -> exchange.PullFragmentRequest:
    """Creates a run of one tensor; returns what pulls all of it."""
    header = await _create_large(stubs, numel)
    frames = [
        forgery.float32_frame(np.zeros(min(ZEROS, numel - at), np.float32), first=at) for at in range(0, numel, ZEROS)
    ]
    digest = hashlib.sha256(bytes(4 * numel)).digest()
    messages = [exchange.PushDeltaRequest(header=header)]
    messages.append(exchange.PushDeltaRequest(part=exchange.PartBegin(numel=numel)))
    messages += [exchange.PushDeltaRequest(data=frame) for frame in frames]
    messages.append(exchange.PushDeltaRequest(part_end=exchange.PartEnd(digest=digest)))
    whole = delta_digest([(0, numel, digest)])
    messages.append(exchange.PushDeltaRequest(complete=exchange.PushComplete(digest=whole)))
    await send(stubs, messages)
    await stubs.runs.CommitRun(runs.CommitRunRequest(name=header.run, run_uid=header.run_uid))
    return exchange.PullFragmentRequest(run=header.run, fragment="all", from_version=-1, is_newest=True)


async def test_downloads_that_nobody_reads_hold_few_pieces_and_are_ended(
    server: SyncerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(server.port, has_fixed_windows=True) as stubs, connected(server.port) as honest:
        request = await _created_large(honest, 2**22)
        calls = [stubs.exchange.PullFragment(request) for _ in range(40)]
        for call in calls:
            await call.read()
        budget = server.host.downloads
        async with asyncio.timeout(20):
            while budget.used_bytes < budget.limit_bytes // 16:
                await asyncio.sleep(0.05)
        begun_s, read_bytes = time.monotonic(), 0
        async for response in honest.exchange.PullFragment(request):
            read_bytes += len(response.data.data)
        assert (read_bytes > 2**24, time.monotonic() - begun_s < 10) == (True, True)
        assert budget.peak_bytes <= budget.limit_bytes // 8  # two clients' shares
        for call in calls:
            call.cancel()
        await _released(budget)

        monkeypatch.setattr(quotas, "GRACE_S", 0.2)
        monkeypatch.setattr(quotas, "LEAST_BYTES_A_SECOND", 2**24)
        calls = [stubs.exchange.PullFragment(request) for _ in range(40)]
        async with asyncio.timeout(20):
            while not budget.used_bytes:
                await asyncio.sleep(0.02)
        await _released(budget)  # all were ended, though no client has read or left
        with refused("TOO_SLOW", EXHAUSTED):
            async for _ in calls[0]:
                pass
        for call in calls:
            call.cancel()


async def test_a_clients_pushes_and_downloads_together_have_a_rate() -> None:
    rate, numel = 2**23, 2**20
    settings = replace(LOCAL, host=HostSettings(client_bytes_a_second=rate))
    async with serving(open_objects("memory://"), settings) as bounded, connected(bounded.port) as stubs:
        begun_s = time.monotonic()
        request = await _created_large(stubs, numel)
        pushed_s = time.monotonic() - begun_s

        async def pulled() -> int:
            return sum([len(one.data.data) async for one in stubs.exchange.PullFragment(request)])

        begun_s = time.monotonic()
        assert min(await asyncio.gather(pulled(), pulled())) >= 4 * numel
        pulled_s = time.monotonic() - begun_s
    early_s = quotas._RATE_BURST_S + quotas._RATE_PAUSE_S
    assert (pushed_s > 4 * numel / rate - early_s, pulled_s > 2 * 4 * numel / rate - early_s) == (True, True)


async def test_new_learner_ids_come_at_a_rate_and_known_ones_at_any(
    server: SyncerServer, stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.host, "new_ids", Rate("new learners", SystemClock(), burst=5, pause_s=600.0))
    run, _ = await create_run(stubs)
    learners = [RawLearner(stubs, run, f"n{number}", random.Random(number)) for number in range(6)]
    for learner in learners[:5]:
        await learner.attach()
        learner.detach()
    with refused("QUOTA_EXCEEDED", EXHAUSTED) as caught:
        await learners[5].attach()
    assert 0 < (caught.refusal.retry_after_s or 0) <= 600
    await learners[0].attach()
    for learner in learners:
        learner.detach()


async def test_of_many_learners_an_answer_has_the_live_ones(
    server: SyncerServer, stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "MOST_LISTED", 50)
    run, _ = await create_run(stubs)
    log = (await server.host.open("demo")).log
    await log.append([SessionItem(f"n{number}", f"{number:032x}", "") for number in range(5000)])
    learner = RawLearner(stubs, run, "us", random.Random(1))
    await learner.attach()
    seen = (await stubs.runs.GetRun(runs.GetRunRequest(name="demo"))).learners
    assert (len(seen), [one.learner_id for one in seen if one.is_live]) == (50, ["us"])
    learner.detach()


def test_a_rate_lets_a_burst_through_and_then_one_after_each_pause() -> None:
    clock = StillClock()
    rate = Rate("things", clock, burst=3, pause_s=10.0)
    for _ in range(3):
        rate.take("a")
    with pytest.raises(SyncerError, match="too many things") as caught:
        rate.take("a")
    assert (caught.value.reason, caught.value.retry_after_s) == ("QUOTA_EXCEEDED", 10.0)
    rate.take("b")
    clock.now_s += 10
    rate.take("a")
    with pytest.raises(SyncerError):
        rate.take("a")


def test_parts_of_deltas_that_are_never_completed_are_bounded_and_completed_ones_are_not() -> None:
    clock, gib = StillClock(), 2**30
    parts = orphans(clock, gib // 16)
    for number in range(100):
        parts.check("a", gib)
        parts.stored("a", str(number), gib)
        parts.finished(str(number))
    parts.stored("a", "lost", gib)
    clock.now_s += 80_000
    parts.stored("a", "lost", gib)
    for later_s in (0, 80_000):  # the last part is younger than a day
        clock.now_s += later_s
        with pytest.raises(SyncerError) as caught:
            parts.check("a", 1)
        assert caught.value.reason == "QUOTA_EXCEEDED"
        parts.check("b", gib)
    clock.now_s += 6401
    parts.check("a", gib)


@pytest.fixture
def without_collector() -> Iterator[None]:
    """Stands for Python's garbage collector that finds nothing old enough to look at, which may be so for hours."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize(
    ("method", "requests", "code"),
    [
        ("skerry.v1.Runs/ListRuns", [runs.ListRunsRequest()], grpc.StatusCode.OK),
        ("skerry.v1.Runs/GetRun", [runs.GetRunRequest(name="no-such-run")], grpc.StatusCode.NOT_FOUND),
        (
            "skerry.v1.Exchange/PullFragment",
            [exchange.PullFragmentRequest(run="no-such-run")],
            grpc.StatusCode.NOT_FOUND,
        ),
        (
            "skerry.v1.Exchange/PushDelta",
            3 * [exchange.PushDeltaRequest(data=b"before its header")],
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            "skerry.v1.Exchange/Attach",
            [exchange.AttachRequest(leave=exchange.Leave())],
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            "grpc.health.v1.Health/Check",
            [health_pb2.HealthCheckRequest(service="no such service")],
            grpc.StatusCode.NOT_FOUND,
        ),
    ],
)
async def test_a_connection_takes_calls_however_many_there_were(
    method: str, requests: list[Message], code: grpc.StatusCode, stubs: Stubs
) -> None:
    messages = [one.SerializeToString() for one in requests]
    for _ in range(200):
        try:
            await stubs.channel.stream_unary(f"/{method}", None, None)(iter(messages), timeout=10)
            answered = grpc.StatusCode.OK
        except grpc.aio.AioRpcError as error:
            answered = code if is_answer_lost(error) else error.code()
        assert answered == code


@pytest.mark.usefixtures("without_collector")
async def test_a_connection_takes_calls_however_many_were_given_up(stubs: Stubs) -> None:
    learner, header = await attached(stubs)
    for number in range(200):
        watch, push = stubs.exchange.Watch(exchange.WatchRequest(run="demo")), stubs.exchange.PushDelta(None)
        await watch.read()
        await push.write(exchange.PushDeltaRequest(header=header))
        watch.cancel()
        push.cancel()
        assert (await stubs.runs.ListRuns(runs.ListRunsRequest(), timeout=10)).runs, number
    learner.detach()


async def test_pushes_to_a_run_that_are_under_way_are_bounded(
    server: SyncerServer, stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.host, "pushes", CallsToRuns("pushes", of_run=5, of_client=3))
    greedy, first = await attached(stubs)
    honest = RawLearner(stubs, greedy.run, "honest", random.Random(8))
    await honest.attach()
    base = await pull(stubs, greedy.run, "body")
    held = [await _begun(server, stubs, first)]
    held += [await _begun(server, stubs, greedy.header(base, "body")) for _ in range(2)]
    with refused("QUOTA_EXCEEDED", EXHAUSTED) as caught:
        await greedy.push(greedy.header(base, "body"), np.ones(layout("body").numel, np.float32))
    assert caught.refusal.retry_after_s
    held += [await _begun(server, stubs, honest.header(base, "body")) for _ in range(2)]
    mine = honest.header(base, "head")
    mine.base_digest = (await pull(stubs, greedy.run, "head")).plan.target.digest
    values = np.ones(layout("head").numel, np.float32)
    with refused("QUOTA_EXCEEDED", EXHAUSTED):
        await honest.push(mine, values)
    await create_run(stubs, "other")  # whose pushes count for themselves
    for call in held:
        call.cancel()
    await _released(server.host.budget)
    await honest.push(mine, values)
    greedy.detach()
    honest.detach()


async def _begun(server: SyncerServer, stubs: Stubs, header: exchange.PushHeader) -> Any:
    """Returns a push that goes on until it is cancelled, once the syncer has taken its part's beginning."""
    budget = server.host.budget
    call: Any = stubs.exchange.PushDelta(None)
    before = budget.used_bytes
    await call.write(exchange.PushDeltaRequest(header=header))
    part = exchange.PartBegin(numel=layout(header.fragment).numel, size_bytes=2**20)
    await call.write(exchange.PushDeltaRequest(part=part))
    async with asyncio.timeout(20):
        while budget.used_bytes == before:
            await asyncio.sleep(0.01)
    return call


async def _released(budget: ByteBudget) -> None:
    """Returns when nothing is held and no call that had not begun yet takes anything."""
    free_s = 0.0
    async with asyncio.timeout(20):
        while free_s < 0.5:
            await asyncio.sleep(0.05)
            free_s = 0.0 if budget.used_bytes else free_s + 0.05


async def test_one_connection_has_a_bounded_number_of_streams(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_service, "MOST_CLIENT_WATCHES", 200)
    async with serving(open_objects(store_url), LOCAL) as server, connected(server.port) as stubs:
        await create_run(stubs)
        watches = [stubs.exchange.Watch(exchange.WatchRequest(run="demo")) for _ in range(200)]
        firsts = [asyncio.ensure_future(watch.read()) for watch in watches]
        await asyncio.wait(firsts, timeout=2)
        served = [one for one in firsts if one.done() and one.exception() is None]
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*firsts, return_exceptions=True)
        assert 100 < len(served) <= 128


async def test_a_listing_opens_no_run_that_did_not_change_since_the_last(store_url: str) -> None:
    settings = replace(LOCAL, host=HostSettings(idle_s=0.1, sweep_s=0.05, name_lifetime_s=0.1))
    async with serving(open_objects(store_url), settings) as server, connected(server.port) as stubs:
        run, _ = await create_run(stubs)

        async def listed() -> types.Run:
            async with asyncio.timeout(20):
                while server.host.opened(run.uid):
                    await asyncio.sleep(0.02)
            (found,) = (await stubs.runs.ListRuns(runs.ListRunsRequest())).runs
            return found

        first = await listed()
        assert server.host.opened(run.uid)
        assert await listed() == first
        assert not server.host.opened(run.uid)
        policy = types.Policy(quorum_count=3)
        await stubs.runs.SetPolicy(runs.SetPolicyRequest(request_id="a" * 32, name="demo", policy=policy))
        assert (await listed()).policy.quorum_count == 3


async def test_new_sessions_of_a_learner_are_bounded_and_its_own_is_not(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "SESSION_BURST", 3)
    monkeypatch.setattr(host, "SESSION_PAUSE_S", 1000.0)
    async with serving(open_objects(store_url), LOCAL) as server, connected(server.port) as stubs:
        run, _ = await create_run(stubs)
        sessions = [RawLearner(stubs, run, "us", random.Random(number)) for number in range(5)]
        for learner in sessions[:4]:  # the first is of a new learner
            await learner.attach()
        with refused("QUOTA_EXCEEDED", EXHAUSTED) as caught:
            await sessions[4].attach()
        assert caught.refusal.retry_after_s
        await sessions[3].attach()
        await RawLearner(stubs, run, "eu", random.Random(9)).attach()


async def test_questions_for_unknown_deltas_are_bounded(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "QUERY_BURST", 3)
    monkeypatch.setattr(host, "QUERY_PAUSE_S", 1000.0)
    async with serving(open_objects(store_url), LOCAL) as server, connected(server.port) as stubs:
        learner, header = await attached(stubs)
        for _ in range(3):
            await learner.query(header)
        with refused("QUOTA_EXCEEDED", EXHAUSTED):
            await learner.query(header)
        await learner.push(header, np.ones(layout("body").numel, np.float32))
        for _ in range(5):
            assert (await learner.query(header)).state == exchange.PUSH_STATE_ACCEPTED
        learner.detach()


class CountingObjects(DictObjects):
    """Counts what is read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    async def get(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        self.reads += 1
        return await super().get(name, offset=offset, length=length)


async def test_who_lists_runs_again_and_again_does_not_have_them_read_again_and_again() -> None:
    objects, count = CountingObjects(), 40
    async with serving(objects, ServerSettings(listen="127.0.0.1:0")) as server, connected(server.port) as stubs:
        for number in range(count):
            await create_run(stubs, f"run{number}", seed=number)
        for _ in range(2):
            assert len((await stubs.runs.ListRuns(runs.ListRunsRequest())).runs) == count
        before = objects.reads
        for _ in range(10):
            await stubs.runs.ListRuns(runs.ListRunsRequest())
        assert objects.reads - before < 5 * count  # two of each name, one of each log, and what replicas do themselves


async def test_a_listing_has_what_was_changed_before_it(stubs: Stubs) -> None:
    for number in range(3):
        await create_run(stubs, f"run{number}", seed=number)
        listed = (await stubs.runs.ListRuns(runs.ListRunsRequest())).runs
        assert [one.name for one in listed] == [f"run{at}" for at in range(number + 1)]
    policy = types.Policy(inner_step_count=77)
    changed = runs.SetPolicyRequest(name="run1", request_id=hex_id(random.Random(1)), policy=policy)
    await stubs.runs.SetPolicy(changed)
    await stubs.runs.DeleteRun(runs.DeleteRunRequest(name="run2", run_uid=listed[2].uid))
    listed = (await stubs.runs.ListRuns(runs.ListRunsRequest())).runs
    assert [(one.name, one.policy.inner_step_count) for one in listed] == [("run0", 4), ("run1", 77)]
