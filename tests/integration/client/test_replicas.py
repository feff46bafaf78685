"""Clients of several replicas: real processes on one store, of which any may be killed."""

from __future__ import annotations

import asyncio
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from skerry import ArrayLearner, Policy, RunsClient, SkerryError
from skerry.net.grpc_transport import GrpcTransport
from skerry.net.loop_thread import LoopThread
from skerry.net.tls import Insecure
from skerry.v1 import capabilities_pb2
from skerry_syncer.store.log.entries import Fate
from skerry_syncer.store.objects.opening import open_objects
from tests.support.audit import check_fates, final_state
from tests.support.heard_logs import heard_logs
from tests.support.ports import free_ports
from tests.support.quadratic import Quadratic
from tests.support.serve_process import ServeProcess
from tests.support.tcp_link import Link

# Nothing expires, so that every step ends in a merge.
POLICY: Final = Policy(inner_step_count=8, lease_term_s=2.0, quarantine_ratio=0.0, max_staleness=10_000)
# Long for a client that has noticed; one that had to be told by keep-alive would need 50 s.
FAIL_OVER_S: Final = 5.0
# From the hang of a replica to the next acknowledgement by another.
HANG_S: Final = 10.0
# Within which a client connects again to a replica that is back.
RECONNECT_S: Final = 2.5
ASK: Final = capabilities_pb2.GetCapabilitiesRequest()


def wait_until(is_over: Callable[[], bool], within_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not is_over():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


class Replicas:
    """`skerry serve` at some addresses on one store, for callers that are not asynchronous."""

    def __init__(self, folder: Path, *addresses: tuple[str, int | None]) -> None:
        self.store_url = (folder / "store").as_uri()
        self.thread = LoopThread("replicas")
        self.processes: list[ServeProcess] = []
        self.links: list[Link] = []
        for number, address in enumerate(addresses):
            (folder / str(number)).mkdir()
            self.processes.append(ServeProcess(self.store_url, folder / str(number), *address))
            self.thread.run(self.processes[-1].start())
            self.links.append(Link(self.processes[-1].port))
            self.thread.run(self.links[-1].open(0))

    @property
    def target(self) -> str:
        """All addresses."""
        return ",".join(f"{process.host}:{process.port}" for process in self.processes)

    @property
    def relayed(self) -> str:
        """The addresses of all links, through which all bytes pass."""
        return ",".join(f"127.0.0.1:{link.port}" for link in self.links)

    @contextmanager
    def hanging(self, number: int, how: str) -> Iterator[None]:
        """Has one hang: its process or its event loop stands still, or nothing passes its link."""
        process, link = self.processes[number], self.links[number]
        hangs = {
            "stopped": process.stop_running,
            "stuck": process.block_loop,
            "swallowed": link.swallow,
        }
        self.thread.call(hangs[how])
        yield
        self.thread.call(link.heal)
        self.thread.call(process.go_on)
        if how == "stuck":
            self.kill(number)
            self.start(number)

    def kill(self, number: int) -> None:
        """Kills one with SIGKILL."""
        self.thread.run(self.processes[number].kill())

    def start(self, number: int) -> None:
        """Starts it again, on its port."""
        self.thread.run(self.processes[number].start())

    def close(self) -> None:
        """Ends all."""
        for link in self.links:
            self.thread.run(link.close())
        for process in self.processes:
            self.thread.run(process.stop())
        self.thread.close()


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[Replicas]:
    with closing(Replicas(tmp_path, ("127.0.0.1", None), ("127.0.0.1", None))) as pair:
        yield pair


class Trainer:
    """A learner that trains on a thread of its own, and notes how long it was detached at a time."""

    def __init__(self, target: str, name: str, seed: int, *, pause_s: float = 0.0) -> None:
        self._problem = Quadratic(seed)
        self._pause_s = pause_s
        self._stop = threading.Event()
        self.longest_detached_s = 0.0
        self.learner = ArrayLearner(
            self._problem.arrays, target=target, run="fit", learner_id=name, create=True, policy=POLICY
        )
        self._thread = threading.Thread(target=self._train, name=name)
        self._thread.start()

    def _train(self) -> None:
        attached_at_s = time.monotonic()
        while not self._stop.is_set():
            self.learner.step(tokens=8, loss=self._problem.descend())
            time.sleep(self._pause_s)
            now_s = time.monotonic()
            self.longest_detached_s = max(self.longest_detached_s, now_s - attached_at_s)
            if self.learner.stats.is_attached:
                attached_at_s = now_s

    def until_merged(self, more: int, within_s: float = 60.0) -> None:
        """Returns once so many more of its deltas are merged."""
        wanted = self.learner.stats.deltas_merged + more
        wait_until(lambda: self.learner.stats.deltas_merged >= wanted, within_s)

    def give_up(self) -> None:
        """Ends the training, whatever is unsent."""
        self._stop.set()
        self._thread.join()
        self.learner.close()

    def stop(self) -> int:
        """Ends the training, sends what is unsent, and returns the number of steps."""
        self._stop.set()
        self._thread.join()
        assert self.learner.flush(30), self.learner.stats
        assert self.learner.failure is None
        self.learner.close()
        return self.learner.stats.step_count


@pytest.mark.long
@pytest.mark.timeout(300)
def test_killing_either_replica_under_load_costs_no_learner_a_step(replicas: Replicas) -> None:
    learners = {name: Trainer(replicas.target, name, seed) for seed, name in enumerate(("us", "eu", "ap", "sa"))}
    try:
        for each in learners.values():
            each.until_merged(2)
        for number in (0, 1, 0):
            replicas.kill(number)
            for each in learners.values():
                each.until_merged(3)
            replicas.start(number)
    finally:
        step_counts = {name: each.stop() for name, each in learners.items()}
    with RunsClient(replicas.target) as client:
        run = client.close_run("fit")
    state = asyncio.run(final_state(open_objects(replicas.store_url), "fit", run.uid))
    assert check_fates(state, set())[Fate.QUARANTINED] == 0
    # Every learner has 2 fragments; each of its steps is in one merged delta of each, and in no other.
    merged = {name: dict.fromkeys(state.fragments, 0) for name in learners}
    for delta in state.deltas.values():
        if delta.fate is Fate.MERGED and delta.item.learner in merged:
            merged[delta.item.learner][delta.item.fragment] += delta.item.step_count
    assert merged == {name: dict.fromkeys(state.fragments, count) for name, count in step_counts.items()}
    assert max(each.longest_detached_s for each in learners.values()) < FAIL_OVER_S


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "how", ["stopped", *(pytest.param(how, marks=pytest.mark.long) for how in ("stuck", "swallowed"))]
)
def test_a_replica_that_hangs_delays_those_who_train_and_who_join_by_seconds(replicas: Replicas, how: str) -> None:
    target = replicas.relayed if how == "swallowed" else replicas.target
    trainer = Trainer(target, "us", 0, pause_s=0.02)
    for number in range(2):
        trainer.until_merged(2)
        with replicas.hanging(number, how):
            acknowledged = trainer.learner.stats.deltas_acknowledged
            wait_until(lambda: trainer.learner.stats.deltas_acknowledged > acknowledged + 1, HANG_S)  # noqa: B023 - waits here
            began_s = time.monotonic()
            Trainer(target, f"late-{number}", 1).stop()
            assert time.monotonic() - began_s < HANG_S
    trainer.stop()
    assert trainer.longest_detached_s < HANG_S


@pytest.mark.long
@pytest.mark.timeout(180)
def test_a_slow_link_is_not_taken_for_a_replica_that_hangs(replicas: Replicas) -> None:
    weights = {"weight": np.random.default_rng(0).normal(size=60_000).astype(np.float32)}
    for link in replicas.links:
        link.slow_down(bytes_per_s=30_000, delay_s=0.05)
    with heard_logs() as logs, RunsClient(replicas.relayed) as client:
        client.create_run("fit", weights)
        pulled = dict(client.pull("fit"))
    np.testing.assert_array_equal(pulled["weight"], weights["weight"])
    assert [line["event"] for line in logs if "hangs" in line["event"]] == []


@pytest.mark.long
@pytest.mark.timeout(180)
def test_a_learner_whose_run_vanishes_goes_on_when_it_is_back_but_not_with_another_run(tmp_path: Path) -> None:
    store, away = tmp_path / "store", tmp_path / "away"
    with closing(Replicas(tmp_path, ("127.0.0.1", None))) as replicas, heard_logs() as logs:
        trainer = Trainer(replicas.target, "us", 0, pause_s=0.02)
        learner = trainer.learner

        def lose_store() -> None:
            replicas.kill(0)
            store.rename(away)
            replicas.start(0)
            wait_until(lambda: "store is mounted" in str(learner.stats.problem))

        trainer.until_merged(2)
        lose_store()
        step_count = learner.stats.step_count
        wait_until(lambda: learner.stats.step_count > step_count + 200)
        assert (learner.stats.is_attached, learner.failure) == (False, None)
        replicas.kill(0)
        shutil.rmtree(store)
        away.rename(store)
        replicas.start(0)
        trainer.until_merged(3)
        assert learner.stats.problem is None
        told = [line for line in logs if line.get("reason") == "RUN_NOT_FOUND" and "tried again" in line["event"]]
        assert len(told) == 1
        lose_store()
        with RunsClient(replicas.target) as client:
            client.create_run("fit", learner.merged_weights())
        wait_until(lambda: getattr(learner.failure, "reason", "") == "RUN_REPLACED")
        trainer.give_up()


@pytest.mark.timeout(120)
def test_of_a_name_with_several_addresses_any_that_lives_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = socket.getaddrinfo
    (port,) = free_ports(1, "127.0.0.2")
    addresses = ("127.0.0.2", port), ("127.0.0.3", port)

    def two_addresses(host: str, *arguments: Any, **options: Any) -> list[Any]:
        hosts = [address for address, _ in addresses] if host == "syncer.test" else [host]
        return [info for address in hosts for info in own(address, *arguments, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", two_addresses)
    with (
        closing(Replicas(tmp_path, *addresses)) as replicas,
        RunsClient(f"syncer.test:{port}", tls="insecure") as client,
    ):
        client.create_run("fit", {"bias": np.zeros(4, np.float32)})
        for dead in range(2):
            replicas.kill(dead)
            for _ in range(4):
                began_s = time.monotonic()
                assert [run.name for run in client.list_runs()] == ["fit"]
                assert time.monotonic() - began_s < FAIL_OVER_S
            replicas.start(dead)
            time.sleep(RECONNECT_S)


def test_calls_are_spread_over_the_healthy_replicas_and_a_draining_one_gets_none(replicas: Replicas) -> None:
    async def spread() -> None:
        transport = GrpcTransport(replicas.target)
        targets = dict(zip(transport._replicas, replicas.target.split(","), strict=True))

        async def until(wanted: set[str]) -> None:
            """Returns once exactly the wanted replicas answer; no call may fail."""
            answering: set[str] = set()
            async with asyncio.timeout(20):
                while answering != wanted:
                    connections = [await transport._replicas.next() for _ in range(6)]
                    await asyncio.gather(*(each.capabilities.GetCapabilities(ASK, timeout=5) for each in connections))
                    answering = {targets[each.replica] for each in connections}

        await until(set(targets.values()))
        await asyncio.wrap_future(replicas.thread.start(_terminated(replicas.processes[0])))
        await until({replicas.target.split(",")[1]})
        await transport.close()

    asyncio.run(spread())


async def _terminated(process: ServeProcess) -> None:
    process.terminate()
    assert await process.exit_status() == 0


def test_no_proxy_of_the_environment_is_used_for_this_machine(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:1")
    for name in (target, target.replace("127.0.0.1", "localhost")):
        with RunsClient(name) as client:
            assert client.list_runs() == []


@pytest.mark.parametrize(("variable", "tls"), [("https_proxy", None), ("grpc_proxy", "insecure")])
def test_a_proxy_of_the_environment_is_named_where_it_is_in_the_way(
    variable: str, tls: Insecure | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "http://me:secret@127.0.0.1:1")

    def error() -> str:
        with RunsClient("syncer.test:50051", tls=tls, timeout_s=10) as client, pytest.raises(SkerryError) as caught:
            client.list_runs()
        return str(caught.value)

    monkeypatch.setenv("NO_PROXY", ".test")  # which gRPC does not read
    with heard_logs() as logs:
        assert f"target=syncer.test:50051, {variable}=http://***@127.0.0.1:1" in error()
        monkeypatch.setenv("no_grpc_proxy", "other.test, .test")
        assert "proxy" not in error()
    assert len(logs) == (tls == "insecure")
